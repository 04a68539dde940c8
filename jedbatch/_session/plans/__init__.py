"""Recorded minibatches as plans, for one device or for several."""
