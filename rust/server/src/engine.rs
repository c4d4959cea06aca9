//! One engine that has said hello, as the routes see it.

use rollspan_engine_client::EngineClient;
use rollspan_generate::{ApiError, Reason, Served};
use serde_json::Value;

use crate::answer;

/// An engine that has said hello; it may be gone by now.
pub(crate) struct Engine {
    pub client: EngineClient,
    pub served: Served,
}

impl Engine {
    /// Its rank in the set.
    pub fn index(&self) -> u64 {
        self.client.hello().engine_index
    }

    /// Whether its link is up.
    pub fn is_there(&self) -> bool {
        !self.client.is_dead()
    }

    /// Whether it could generate, as far as its weights are concerned.
    pub fn is_fit(&self) -> bool {
        self.check_fit().is_ok()
    }

    /// Refuses states of the weights in which it cannot generate.
    ///
    /// # Errors
    /// Which one, and what helps.
    pub fn check_fit(&self) -> Result<(), ApiError> {
        let (reason, message) = match &*self.client.status().weight_state {
            "inconsistent" => (
                Reason::WeightsInconsistent,
                "the weights are not whole: an update in place was cut off, or they were reset or dropped; update them all",
            ),
            "undeclared" => (
                Reason::WeightsUndeclared,
                "nobody has named the weights yet: finish an update with a weight_version, or POST /update_weight_version",
            ),
            "sleeping" => (Reason::EngineSleeping, "the engine sleeps: POST /wake_up"),
            _ => return Ok(()),
        };
        Err(ApiError::new(reason, message))
    }

    /// Calls a method, and waits as long as it takes.
    ///
    /// # Errors
    /// What the engine says against it.
    pub async fn call(&self, method: &str, arguments: Vec<Value>) -> Result<Value, ApiError> {
        self.client.call(method, arguments).await.map_err(|error| answer::of_call(&error))
    }
}
