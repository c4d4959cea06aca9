//! Which mailbox an output belongs to.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rollspan_protocol::{EngineCoreOutput, EngineError, FinishReason};

use crate::error::{Death, RequestError, SubmitError};
use crate::mailbox::{Delta, Mailbox};
use crate::observer::Observer;

/// Where the outputs of one internal id go.
struct Route {
    mailbox: Arc<Mailbox>,
    choice: usize,
}

#[derive(Default)]
struct Routes {
    by_external_id: HashMap<Arc<str>, Arc<Mailbox>>,
    by_internal_id: HashMap<Arc<str>, Route>,
    death: Option<Death>,
}

impl Routes {
    fn forget(&mut self, mailbox: &Mailbox, ids: &[Arc<str>]) {
        for id in ids {
            self.by_internal_id.remove(id);
        }
        self.by_external_id.remove(&mailbox.external_id);
    }
}

/// What a message says of the weights and the engine behind all of its outputs.
pub(crate) struct Step {
    pub engine_index: u64,
    pub weight_version: Option<Arc<str>>,
    pub weight_commit: Option<u64>,
    pub received: Instant,
}

/// The open requests of one link. Locked once per message, not per token.
#[derive(Default)]
pub(crate) struct Registry {
    routes: Mutex<Routes>,
}

impl Registry {
    fn routes(&self) -> MutexGuard<'_, Routes> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of open submissions.
    pub fn len(&self) -> usize {
        self.routes().by_external_id.len()
    }

    /// Whether a submission of this external id is open.
    pub fn is_open(&self, external_id: &str) -> bool {
        self.routes().by_external_id.contains_key(external_id)
    }

    /// Opens a submission, unless the engine is dead or the external id is open already.
    pub fn open(&self, mailbox: &Arc<Mailbox>) -> Result<(), SubmitError> {
        let mut routes = self.routes();
        if let Some(death) = &routes.death {
            return Err(death.clone().into());
        }
        match routes.by_external_id.entry(Arc::clone(&mailbox.external_id)) {
            Entry::Occupied(entry) => return Err(SubmitError::Duplicate(entry.key().to_string())),
            Entry::Vacant(entry) => entry.insert(Arc::clone(mailbox)),
        };
        for (choice, id) in mailbox.ids.iter().enumerate() {
            routes.by_internal_id.insert(Arc::clone(id), Route { mailbox: Arc::clone(mailbox), choice });
        }
        Ok(())
    }

    /// Hands the outputs of one step to their mailboxes. Gives the internal ids that must be aborted in the engine:
    /// the siblings of a choice that failed.
    pub fn deliver(&self, outputs: Vec<EngineCoreOutput>, step: &Step, observer: &dyn Observer) -> Vec<Arc<str>> {
        let mut to_abort = Vec::new();
        let mut routes = self.routes();
        for output in outputs {
            let Some(route) = routes.by_internal_id.get(output.request_id.as_str()) else {
                continue;
            };
            if output.finish_reason == Some(FinishReason::Error) || output.error.is_some() {
                let mailbox = Arc::clone(&route.mailbox);
                let failed = output.request_id;
                let error = output.error.unwrap_or_else(unexplained);
                let closed = mailbox.fail(RequestError::Engine(error), step.received, observer);
                routes.forget(&mailbox, &closed);
                to_abort.extend(closed.into_iter().filter(|id| **id != *failed));
            } else if output.finish_reason.is_some() {
                let Some((id, route)) = routes.by_internal_id.remove_entry(output.request_id.as_str()) else {
                    continue;
                };
                route.mailbox.push(step.delta(route.choice, output), step.received, observer);
                if route.mailbox.is_closed() {
                    routes.forget(&route.mailbox, &[id]);
                }
            } else {
                route.mailbox.push(step.delta(route.choice, output), step.received, observer);
            }
        }
        to_abort
    }

    /// Ends submissions by external id (`None` for all) with what they have and finish reason `abort`. Gives how many
    /// were open and the internal ids to abort in the engine.
    pub fn abort(
        &self,
        external_ids: Option<&[String]>,
        engine_index: u64,
        observer: &dyn Observer,
    ) -> (usize, Vec<Arc<str>>) {
        let mut routes = self.routes();
        let mailboxes: Vec<_> = match external_ids {
            Some(ids) => ids.iter().filter_map(|id| routes.by_external_id.remove(id.as_str())).collect(),
            None => routes.by_external_id.drain().map(|(_, mailbox)| mailbox).collect(),
        };
        let now = Instant::now();
        let mut aborted = Vec::new();
        for mailbox in &mailboxes {
            let ids = mailbox.abort(engine_index, now, observer);
            routes.forget(mailbox, &ids);
            aborted.extend(ids);
        }
        (mailboxes.len(), aborted)
    }

    /// Ends a submission that nobody waits for any more. Gives the internal ids to abort in the engine.
    pub fn abandon(&self, mailbox: &Mailbox, observer: &dyn Observer) -> Vec<Arc<str>> {
        let mut routes = self.routes();
        let ids = mailbox.abandon(Instant::now(), observer);
        if !ids.is_empty() {
            routes.forget(mailbox, &ids);
        }
        ids
    }

    /// Ends the submissions that own these internal ids.
    pub fn fail(&self, ids: &[String], error: &Death, observer: &dyn Observer) {
        let mut routes = self.routes();
        for id in ids {
            if let Some(route) = routes.by_internal_id.get(id.as_str()) {
                let mailbox = Arc::clone(&route.mailbox);
                let closed = mailbox.fail(RequestError::Dead(error.clone()), Instant::now(), observer);
                routes.forget(&mailbox, &closed);
            }
        }
    }

    /// Ends everything, and refuses whatever comes later.
    pub fn die(&self, death: &Death, observer: &dyn Observer) {
        let mut routes = self.routes();
        routes.death = Some(death.clone());
        routes.by_internal_id.clear();
        for (_, mailbox) in routes.by_external_id.drain() {
            mailbox.fail(RequestError::Dead(death.clone()), Instant::now(), observer);
        }
    }
}

impl Step {
    fn delta(&self, choice: usize, output: EngineCoreOutput) -> Delta {
        Delta {
            choice,
            engine_index: self.engine_index,
            weight_version: self.weight_version.clone(),
            weight_commit: self.weight_commit,
            output,
        }
    }
}

fn unexplained() -> EngineError {
    EngineError {
        code: "engine_error".to_owned(),
        message: "the engine ended the request with an error and did not say which".to_owned(),
        ..EngineError::default()
    }
}
