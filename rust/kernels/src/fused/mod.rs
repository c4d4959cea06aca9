//! Fused elementwise operations of the forward pass.
