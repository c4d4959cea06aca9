"""Weights: how they arrive, are verified and put into force. The only writer of weights, label, commit and digest."""
