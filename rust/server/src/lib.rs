//! The HTTP frontend: routes over the links of one or several engines.
//!
//! [`serve`] answers on a listener until it is told to stop. The engine may come later than the first request: until its
//! hello, routes answer 503. Request bodies and answers of generate are `rollspan-generate`'s; this crate moves them
//! between HTTP and the engine link and turns every failure into one shape ([`answer`]).

mod answer;
mod app;
mod body;
mod control;
mod engine;
mod engine_set;
mod fan_out;
mod flags;
mod metrics;
mod options;
mod panics;
mod routes;
mod routing;
mod serve;
mod set_update;
mod unread;
mod uploads;

pub use flags::Flags;
pub use options::Options;
pub use serve::{Event, ServeError, serve};
