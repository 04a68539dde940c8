"""The granularity of nodes: taking calls apart and putting operations together."""
