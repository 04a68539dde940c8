"""What a node is: taking calls apart and putting operations together."""
