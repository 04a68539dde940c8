"""Recording the instances of a minibatch."""
