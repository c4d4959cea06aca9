//! One call of all engines of a set, and what to make of their answers.

use std::collections::HashSet;
use std::sync::Arc;

use futures::future::join_all;
use rollspan_generate::{ApiError, Reason};
use serde_json::{Value, json};

use crate::answer::Failure;
use crate::engine::Engine;

/// What became of a call in one engine.
pub(crate) struct Outcome {
    pub engine: Arc<Engine>,
    pub result: Result<Value, ApiError>,
}

impl Outcome {
    /// Whether the engine died before it answered. It takes no part any more: that is no failure of the call.
    pub fn is_gone(&self) -> bool {
        self.result.as_ref().is_err_and(|error| [Reason::EngineDead, Reason::DecodeError].contains(&error.reason))
    }

    /// What clients are told of it.
    pub fn to_json(&self) -> Value {
        let index = self.engine.index();
        match &self.result {
            Ok(result) => json!({"engine_index": index, "result": result}),
            Err(error) => json!({"engine_index": index, "error": error.body()["error"]}),
        }
    }
}

/// Calls one engine, and waits as long as it takes.
pub(crate) async fn call_engine(engine: Arc<Engine>, method: &str, arguments: Vec<Value>) -> Outcome {
    let result = engine.call(method, arguments).await;
    Outcome { engine, result }
}

/// Calls all of them at once.
pub(crate) async fn call_all(engines: &[Arc<Engine>], method: &str, arguments: &[Value]) -> Vec<Outcome> {
    call_each(engines, method, |_| arguments.to_vec()).await
}

/// Calls all of them at once, each with its own arguments.
pub(crate) async fn call_each(
    engines: &[Arc<Engine>],
    method: &str,
    arguments: impl Fn(&Arc<Engine>) -> Vec<Value>,
) -> Vec<Outcome> {
    join_all(engines.iter().map(|engine| call_engine(Arc::clone(engine), method, arguments(engine)))).await
}

/// What is meant for an engine: of several objects there is one for each.
pub(crate) fn info_of(engine: &Engine, infos: &[Value]) -> Value {
    let index = if infos.len() > 1 { usize::try_from(engine.index()).unwrap_or(usize::MAX) } else { 0 };
    infos.get(index).cloned().unwrap_or_default()
}

/// Results of those that succeeded, in a call that did.
///
/// # Errors
/// A single engine's own error; the engines' error where all that live have failed for one reason; otherwise
/// [`Reason::PartialFailure`].
pub(crate) fn successes(outcomes: &[Outcome]) -> Result<Vec<&Value>, Failure> {
    let done: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.result.as_ref().ok()).collect();
    let failed: Vec<_> = outcomes.iter().filter(|outcome| outcome.result.is_err() && !outcome.is_gone()).collect();
    if !done.is_empty() && failed.is_empty() {
        return Ok(done);
    }
    let causes = if failed.is_empty() { outcomes.iter().collect() } else { failed };
    Err(failure(outcomes, &causes, done.is_empty()))
}

/// The error of a call that failed: `causes` are those that failed by themselves, at least one; nothing has changed in any
/// engine when it is `whole`.
pub(crate) fn failure(outcomes: &[Outcome], causes: &[&Outcome], whole: bool) -> Failure {
    let errors = || causes.iter().filter_map(|cause| Some((cause.engine.index(), cause.result.as_ref().err()?)));
    let Some((index, first)) = errors().next() else {
        return ApiError::new(Reason::InternalError, "a call failed and no engine says why").into();
    };
    if outcomes.len() == 1 {
        return first.clone().into();
    }
    let reasons: HashSet<Reason> = errors().map(|(_, error)| error.reason).collect();
    let error = if whole && reasons.len() == 1 {
        ApiError::new(first.reason, format!("engine {index}: {first}"))
    } else {
        let told: Vec<_> = errors().map(|(index, error)| format!("engine {index}: {error}")).collect();
        let (count, all) = (causes.len(), outcomes.len());
        let message = format!("{count} of {all} engines failed ({})", told.join(", "));
        ApiError::new(Reason::PartialFailure, message)
    };
    of_set(error, outcomes)
}

/// An error that tells what became of the call in each engine.
pub(crate) fn of_set(error: ApiError, outcomes: &[Outcome]) -> Failure {
    Failure::from(error).in_engines(outcomes.iter().map(Outcome::to_json).collect())
}

/// The result that all engines gave.
///
/// # Errors
/// As for [`successes`]; [`Reason::PartialFailure`] when they differ.
pub(crate) fn agreed(outcomes: &[Outcome]) -> Result<Value, Failure> {
    let done = successes(outcomes)?;
    match done.split_first() {
        Some((first, rest)) if rest.iter().all(|result| result == first) => Ok((*first).clone()),
        _ => Err(of_set(ApiError::new(Reason::PartialFailure, "the engines differ"), outcomes)),
    }
}
