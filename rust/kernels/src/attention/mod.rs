//! Paged attention with a fused write of the step's keys and values.
