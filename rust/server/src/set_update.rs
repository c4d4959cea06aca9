//! One weight update of all engines, which commits in all of them or, up to its last step, in none.

use std::sync::{Arc, Mutex, PoisonError};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use rollspan_generate::{ApiError, Reason};
use serde_json::{Map, Value, json};

use crate::answer::Failure;
use crate::engine::Engine;
use crate::engine_set::EngineSet;
use crate::fan_out::{Outcome, call_all, call_each, call_engine, failure, info_of, of_set, successes};

const START: &str = "start_weight_update";
const UPDATE: &str = "update_weights";
const PREPARE: &str = "prepare_weight_update";
const FINISH: &str = "finish_weight_update";
const ABORT: &str = "abort_weight_update";

/// The update that this frontend's clients are doing, in the engines that take part in it.
///
/// An engine takes part when it was there at the start. One that dies meanwhile is left out, and so is one that fails and
/// takes no requests anyway: it was restarted, and may lack what the others build upon. Any other failure before the last
/// step drops the update everywhere.
///
/// A single engine is called as it is: it verifies and commits in one call.
pub(crate) struct SetUpdate {
    engines: Arc<EngineSet>,
    members: Mutex<Option<Vec<Arc<Engine>>>>,
    /// Held while a set commits: a client that asks again meanwhile would drop what other engines have yet to commit.
    finishing: tokio::sync::Mutex<()>,
}

impl SetUpdate {
    pub fn new(engines: Arc<EngineSet>) -> Self {
        Self { engines, members: Mutex::default(), finishing: tokio::sync::Mutex::default() }
    }

    fn set_members(&self, members: Option<Vec<Arc<Engine>>>) {
        *self.members.lock().unwrap_or_else(PoisonError::into_inner) = members;
    }

    /// Engines of the open update that are still there; where another frontend has opened it, all.
    fn taking_part(&self) -> Result<Vec<Arc<Engine>>, ApiError> {
        let there = self.engines.there()?;
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let found = members.map_or(there, |members| members.into_iter().filter(|engine| engine.is_there()).collect());
        if found.is_empty() {
            return Err(ApiError::new(Reason::UpdateAborted, "no engine of this weight update is left"));
        }
        Ok(found)
    }

    /// Opens the update everywhere.
    ///
    /// # Errors
    /// An engine refused; it is open nowhere where it was not before.
    pub async fn start(&self, options: Option<&Value>) -> Result<Vec<Outcome>, Failure> {
        let arguments: Vec<Value> = options.cloned().into_iter().collect();
        let outcomes = call_all(&self.engines.there()?, START, &arguments).await;
        if outcomes.iter().any(|outcome| self.counts(outcome)) {
            self.drop_in(&engines_of(outcomes.iter().filter(|outcome| outcome.result.is_ok()))).await;
        }
        let kept = self.judged(&outcomes, false)?;
        self.set_members(Some(kept));
        Ok(outcomes)
    }

    /// Receives everywhere; `infos` has one for each engine of the set, or one for all.
    ///
    /// # Errors
    /// Why the update was dropped everywhere.
    pub async fn update(&self, infos: &[Value]) -> Result<Vec<Outcome>, Failure> {
        self.all_or_none(UPDATE, self.taking_part()?, |engine| vec![info_of(engine, infos)]).await
    }

    /// Commits everywhere under one number. Gives what is in force now, and the outcomes.
    ///
    /// # Errors
    /// Up to the last step, why it was dropped; in it, [`Reason::PartialFailure`].
    pub async fn finish(&self, label: Value, options: Map<String, Value>) -> Result<(Value, Vec<Outcome>), Failure> {
        let _alone = self.finishing.lock().await;
        let taking_part = self.taking_part()?;
        let mut arguments = vec![label.clone()];
        arguments.extend((!options.is_empty()).then(|| Value::Object(options.clone())));
        if self.engines.size() == 1 {
            let outcomes = call_all(&taking_part, FINISH, &arguments).await;
            self.set_members(None);
            let committed = successes(&outcomes)?.into_iter().next().cloned().unwrap_or_default();
            return Ok((committed, outcomes));
        }
        let asked = Value::Object(options.clone());
        match self.all_or_none(PREPARE, taking_part.clone(), |_| vec![asked.clone()]).await {
            Ok(prepared) => self.compare(&prepared).await?,
            // A client that got no answer asks again: engines that have just committed say so again.
            Err(error) if error.reason() == Reason::NoUpdateActive => {
                let outcomes = call_all(&taking_part, FINISH, &arguments).await;
                self.judged(&outcomes, false)?;
                return Ok((first_result(&outcomes), outcomes));
            }
            Err(error) => return Err(error),
        }
        self.commit(label, options).await
    }

    /// Drops the update everywhere, whoever has opened it.
    ///
    /// # Errors
    /// No engine is there.
    pub async fn abort(&self) -> Result<Vec<Outcome>, ApiError> {
        self.set_members(None);
        Ok(call_all(&self.engines.there()?, ABORT, &[]).await)
    }

    /// Drops an update after which engines would have different weights; one that was restarted is left out.
    async fn compare(&self, prepared: &[Outcome]) -> Result<(), Failure> {
        let digest = |outcome: &Outcome| outcome.result.as_ref().ok().map(|result| result["weight_digest"].clone());
        let counted: Vec<_> = prepared.iter().filter(|outcome| self.serves(&outcome.engine)).collect();
        let digests: Vec<_> =
            counted.iter().filter_map(|outcome| Some((outcome.engine.index(), digest(outcome)?))).collect();
        let expected = digests.first().map(|(_, digest)| digest.clone());
        if digests.iter().any(|(_, digest)| Some(digest) != expected.as_ref()) {
            self.drop_in(&self.taking_part()?).await;
            self.set_members(None);
            let told: Vec<_> =
                digests.iter().map(|(index, digest)| format!("engine {index}: {}", text(digest))).collect();
            let message = format!("the engines would have different weights: {}", told.join(", "));
            return Err(of_set(ApiError::new(Reason::DigestMismatch, message), prepared));
        }
        let odd = prepared.iter().filter(|outcome| outcome.result.is_ok() && digest(outcome) != expected);
        let odd = engines_of(odd);
        self.drop_in(&odd).await;
        let kept = self.taking_part()?.into_iter().filter(|engine| !contains(&odd, engine)).collect();
        self.set_members(Some(kept));
        Ok(())
    }

    async fn commit(&self, label: Value, mut options: Map<String, Value>) -> Result<(Value, Vec<Outcome>), Failure> {
        let engines = self.taking_part()?;
        self.set_members(None);
        let commits = call_all(&engines, "get_weight_commit", &[]).await;
        let newest = successes(&commits)?.into_iter().filter_map(Value::as_u64).max().unwrap_or(0);
        options.insert("commit".to_owned(), (newest + 1).into());
        let serving = self.engines.serving();
        // One that was restarted does not know the label that an unnamed update keeps.
        let kept = serving.first().map(|engine| Value::from(&*engine.client.status().weight_version));
        let label_of = |engine: &Arc<Engine>| {
            if label.is_null() && !contains(&serving, engine) {
                kept.clone().unwrap_or_default()
            } else {
                label.clone()
            }
        };
        let arguments = |engine: &Arc<Engine>| vec![label_of(engine), Value::Object(options.clone())];
        let outcomes = call_each(&engines, FINISH, arguments).await;
        let judged = self.judged(&outcomes, true);
        let done = engines_of(outcomes.iter().filter(|outcome| outcome.result.is_ok()));
        let back: Vec<_> = done.iter().filter(|engine| !contains(&serving, engine)).cloned().collect();
        if serving.iter().any(|engine| engine.client.status().paused) {
            // Those that are back have not heard of that pause. One that refuses is as it was.
            let running: Vec<_> = back.iter().filter(|engine| !engine.client.status().paused).cloned().collect();
            drop(call_all(&running, "pause_generation", &["keep".into(), false.into()]).await);
        }
        self.engines.join(&back);
        if !done.is_empty() {
            let behind: Vec<_> = serving.into_iter().filter(|engine| !contains(&done, engine)).collect();
            self.engines.leave(&behind);
        }
        judged?;
        Ok((first_result(&outcomes), outcomes))
    }

    /// One step in all engines; the first failure drops the update in all of them, which ends calls that wait.
    async fn all_or_none(
        &self,
        method: &str,
        engines: Vec<Arc<Engine>>,
        arguments: impl Fn(&Arc<Engine>) -> Vec<Value>,
    ) -> Result<Vec<Outcome>, Failure> {
        let calls = engines.iter().map(|engine| call_engine(Arc::clone(engine), method, arguments(engine)));
        let mut calls: FuturesUnordered<_> = calls.collect();
        let (mut outcomes, mut dropped) = (Vec::new(), false);
        while let Some(outcome) = calls.next().await {
            let counts = self.counts(&outcome);
            outcomes.push(outcome);
            if counts && !dropped {
                dropped = true;
                self.drop_in(&engines).await;
            }
        }
        outcomes.sort_by_key(|outcome| outcome.engine.index());
        if dropped {
            self.set_members(None);
        }
        let kept = self.judged(&outcomes, false)?;
        if kept.len() < outcomes.len() {
            let left = outcomes.iter().filter(|outcome| outcome.result.is_err() && !outcome.is_gone());
            self.drop_in(&engines_of(left)).await;
            self.set_members(Some(kept));
        }
        Ok(outcomes)
    }

    async fn drop_in(&self, engines: &[Arc<Engine>]) {
        if self.engines.size() > 1 {
            // Whatever an engine says against it, there is nothing more to be done.
            drop(call_all(engines, ABORT, &[]).await);
        }
    }

    /// Whether it has the weights of all, as far as there is any that has.
    fn serves(&self, engine: &Arc<Engine>) -> bool {
        let serving = self.engines.serving();
        serving.is_empty() || contains(&serving, engine)
    }

    /// Whether this is a failure of the set.
    fn counts(&self, outcome: &Outcome) -> bool {
        outcome.result.is_err() && !outcome.is_gone() && self.serves(&outcome.engine)
    }

    /// The engines that succeeded, where nothing that counts has failed.
    ///
    /// # Errors
    /// The reason that all failures share; [`Reason::PartialFailure`] where they have several, and in the last step always
    /// when some have succeeded, because there what has been done stays.
    fn judged(&self, outcomes: &[Outcome], last: bool) -> Result<Vec<Arc<Engine>>, Failure> {
        let failed: Vec<_> = outcomes.iter().filter(|outcome| self.counts(outcome)).collect();
        let done = engines_of(outcomes.iter().filter(|outcome| outcome.result.is_ok()));
        if !done.is_empty() && failed.is_empty() {
            return Ok(done);
        }
        if last && !done.is_empty() {
            return Err(failure(outcomes, &failed, false));
        }
        let is_cause =
            |outcome: &&&Outcome| outcome.result.as_ref().is_err_and(|error| error.reason != Reason::UpdateAborted);
        let causes: Vec<_> = failed.iter().filter(is_cause).copied().collect();
        let causes = [causes, failed, outcomes.iter().collect()].into_iter().find(|causes| !causes.is_empty());
        Err(failure(outcomes, &causes.unwrap_or_default(), true))
    }
}

fn engines_of<'o>(outcomes: impl Iterator<Item = &'o Outcome>) -> Vec<Arc<Engine>> {
    outcomes.map(|outcome| Arc::clone(&outcome.engine)).collect()
}

fn contains(engines: &[Arc<Engine>], engine: &Arc<Engine>) -> bool {
    engines.iter().any(|other| Arc::ptr_eq(other, engine))
}

fn first_result(outcomes: &[Outcome]) -> Value {
    outcomes.iter().find_map(|outcome| outcome.result.as_ref().ok()).cloned().unwrap_or_else(|| json!({}))
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
