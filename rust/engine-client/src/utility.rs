//! Utility calls that wait for their answer.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rollspan_protocol::UtilityOutput;
use serde_json::Value;
use tokio::sync::oneshot;

use crate::error::{CallError, Death};

type Answer = Result<Value, CallError>;

/// The open calls of one link, by call id.
#[derive(Default)]
pub(crate) struct Calls {
    last: AtomicU64,
    open: Mutex<HashMap<u64, oneshot::Sender<Answer>>>,
}

impl Calls {
    fn open(&self) -> MutexGuard<'_, HashMap<u64, oneshot::Sender<Answer>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a call: its id, and where its answer will come.
    pub fn begin(&self) -> (u64, oneshot::Receiver<Answer>) {
        let (sender, receiver) = oneshot::channel();
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.open().insert(id, sender);
        (id, receiver)
    }

    /// Forgets a call whose caller is gone.
    pub fn forget(&self, id: u64) {
        self.open().remove(&id);
    }

    /// Hands an answer to its caller; one that nobody waits for is dropped.
    pub fn answer(&self, output: UtilityOutput) {
        let Some(sender) = self.open().remove(&output.call_id) else {
            tracing::debug!(call_id = output.call_id, "an answer to a call that nobody waits for");
            return;
        };
        let answer = output.outcome.map_err(CallError::Failed);
        // A caller that has gone in this instant needs no answer.
        drop(sender.send(answer));
    }

    /// Ends all calls: the engine is gone.
    pub fn fail(&self, death: &Death) {
        for (_, sender) in self.open().drain() {
            drop(sender.send(Err(CallError::Dead(death.clone()))));
        }
    }
}
