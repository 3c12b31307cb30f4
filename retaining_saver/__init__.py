"""Reclaim LangGraph checkpoint storage without ever breaking a conversation."""
