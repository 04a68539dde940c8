"""The granularity of nodes: putting operations together."""
