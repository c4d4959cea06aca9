//! Sampling from rows of logits.
