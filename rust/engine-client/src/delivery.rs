//! When a request's taker is woken.

/// When the taker of a request's outputs wants to hear of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// After each step that produced something: for streams.
    EachStep,
    /// Once, when all of it is there or it has failed: for collected answers. Costs no wake-up per token.
    WhenFinished,
}
