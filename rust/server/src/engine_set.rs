//! The engines behind one frontend: which of them are there, which take requests, and which one takes the next.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rollspan_generate::{ApiError, Reason};

use crate::engine::Engine;
use crate::routing::{least_loaded, session_engine};

/// All engines of one frontend, by index. A place holds the engine that said hello there last, dead or alive.
pub(crate) struct EngineSet {
    size: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    members: Vec<Member>,
    last_chosen: Option<usize>,
    /// Request ids on their way to an engine.
    reserved: HashSet<String>,
}

struct Member {
    engine: Arc<Engine>,
    /// Whether it takes requests while it is there. One that was restarted, or has missed a commit, has other weights than
    /// the rest, so it does not before the next commit of all.
    serves: bool,
    open_requests: usize,
}

/// A request id that nobody else may take until it was submitted.
pub(crate) struct Reserved<'s> {
    set: &'s EngineSet,
    request_id: String,
}

impl Member {
    fn takes_requests(&self) -> bool {
        self.serves && self.engine.is_there()
    }
}

impl State {
    /// Indices of the engines that take requests, at least one.
    fn candidates(&self) -> Result<Vec<usize>, ApiError> {
        let members = self.members.iter().enumerate();
        let serving: Vec<_> = members.filter(|(_, member)| member.takes_requests()).map(|(index, _)| index).collect();
        if !serving.is_empty() {
            return Ok(serving);
        }
        if self.members.is_empty() {
            return Err(ApiError::new(Reason::EngineStarting, "the engine is still starting"));
        }
        match self.members.iter().find_map(|member| member.engine.client.death()) {
            Some(death) if !self.members.iter().any(|member| member.engine.is_there()) => {
                Err(ApiError::new(Reason::EngineDead, death.message))
            }
            _ => {
                let message = "no engine takes requests: those that are there wait for the next weight update";
                Err(ApiError::new(Reason::EngineStarting, message))
            }
        }
    }

    fn choose(&mut self, session_id: Option<&str>, rank: Option<usize>) -> Result<usize, ApiError> {
        let serving = self.candidates()?;
        if let Some(rank) = rank {
            if serving.contains(&rank) {
                return Ok(rank);
            }
            let death = self.members.get(rank).and_then(|member| member.engine.client.death());
            let waits = || "it was restarted or has missed a commit, and waits for the next weight update".to_owned();
            let why = death.map_or_else(waits, |death| death.message);
            return Err(ApiError::new(Reason::EngineDead, format!("engine {rank} takes no requests: {why}")));
        }
        let fit: Vec<_> = serving.iter().copied().filter(|index| self.members[*index].engine.is_fit()).collect();
        let fit = if fit.is_empty() { serving } else { fit };
        let chosen = if let Some(session_id) = session_id {
            session_engine(session_id, &fit)
        } else {
            let counts: Vec<_> = fit.iter().map(|index| (*index, self.members[*index].open_requests)).collect();
            self.last_chosen = least_loaded(&counts, self.last_chosen);
            self.last_chosen
        };
        chosen.ok_or_else(|| ApiError::new(Reason::EngineStarting, "no engine takes requests"))
    }
}

impl EngineSet {
    /// Places for so many engines.
    pub fn new(size: usize) -> Self {
        Self { size, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many engines there are when all are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// All have said hello, in the order of their indices. They take requests, but for those that were restarted before
    /// this frontend was: commits of all have made the numbers of the others equal.
    pub fn ready(&self, engines: Vec<Engine>) {
        let commit = |engine: &Engine| engine.client.hello().weight_commit;
        let newest = engines.iter().map(commit).max();
        let member = |engine: Engine| {
            let serves = Some(commit(&engine)) == newest;
            Member { engine: Arc::new(engine), serves, open_requests: 0 }
        };
        self.state().members = engines.into_iter().map(member).collect();
    }

    /// An engine was restarted and has said hello.
    pub fn replace(&self, index: usize, engine: Engine) -> Option<Arc<Engine>> {
        let mut state = self.state();
        let member = state.members.get_mut(index)?;
        member.engine = Arc::new(engine);
        member.serves = false;
        Some(Arc::clone(&member.engine))
    }

    /// All engines that have said hello, dead or alive.
    ///
    /// # Errors
    /// [`Reason::EngineStarting`].
    pub fn greeted(&self) -> Result<Vec<Arc<Engine>>, ApiError> {
        let engines: Vec<_> = self.state().members.iter().map(|member| Arc::clone(&member.engine)).collect();
        if engines.is_empty() {
            return Err(ApiError::new(Reason::EngineStarting, "the engine is still starting"));
        }
        Ok(engines)
    }

    /// The first engine, dead or alive: limits and model are those of all.
    ///
    /// # Errors
    /// [`Reason::EngineStarting`].
    pub fn first(&self) -> Result<Arc<Engine>, ApiError> {
        self.greeted()?.into_iter().next().ok_or_else(|| ApiError::new(Reason::EngineStarting, "there are no engines"))
    }

    /// Engines that are there, by index: those that control calls go to.
    ///
    /// # Errors
    /// [`Reason::EngineStarting`] or [`Reason::EngineDead`].
    pub fn there(&self) -> Result<Vec<Arc<Engine>>, ApiError> {
        let greeted = self.greeted()?;
        let death = greeted.iter().find_map(|engine| engine.client.death());
        let there: Vec<_> = greeted.into_iter().filter(|engine| engine.is_there()).collect();
        match death {
            Some(death) if there.is_empty() => Err(ApiError::new(Reason::EngineDead, death.message)),
            _ => Ok(there),
        }
    }

    /// Engines that take requests, by index.
    pub fn serving(&self) -> Vec<Arc<Engine>> {
        let state = self.state();
        let serving = state.members.iter().filter(|member| member.takes_requests());
        serving.map(|member| Arc::clone(&member.engine)).collect()
    }

    /// Lets engines take requests: their weights are those of all.
    pub fn join(&self, engines: &[Arc<Engine>]) {
        let mut state = self.state();
        for member in &mut state.members {
            if !member.serves && engines.iter().any(|engine| Arc::ptr_eq(engine, &member.engine)) {
                member.serves = true;
                tracing::info!("engine {} takes requests again", member.engine.index());
            }
        }
    }

    /// Gives engines no more requests: the others have committed weights that they do not have.
    pub fn leave(&self, engines: &[Arc<Engine>]) {
        let mut state = self.state();
        for member in &mut state.members {
            if member.serves && engines.iter().any(|engine| Arc::ptr_eq(engine, &member.engine)) {
                member.serves = false;
                tracing::error!(
                    "engine {} has missed a commit: no requests before the next one",
                    member.engine.index()
                );
            }
        }
    }

    /// Refuses while nothing can be generated.
    ///
    /// # Errors
    /// No engine takes requests, or what is wrong with the weights of all that do.
    pub fn check_fit(&self) -> Result<(), ApiError> {
        let state = self.state();
        let candidates = state.candidates()?;
        let checks: Vec<_> = candidates.iter().map(|index| state.members[*index].engine.check_fit()).collect();
        if checks.iter().any(Result::is_ok) { Ok(()) } else { checks.into_iter().collect() }
    }

    /// Chooses the engine for a request, which counts as open there until [`EngineSet::close_request`]. Requests of one
    /// session go to one engine as long as that is there; `rank` is the index of the engine that has to take it.
    ///
    /// # Errors
    /// [`Reason::DuplicateRequestId`], or there is no such engine.
    pub fn open_request(
        &self,
        request_id: &str,
        session_id: Option<&str>,
        rank: Option<usize>,
    ) -> Result<(usize, Arc<Engine>, Reserved<'_>), ApiError> {
        let mut state = self.state();
        let is_open = |member: &Member| member.engine.client.is_open(request_id);
        if state.reserved.contains(request_id) || state.members.iter().any(is_open) {
            return Err(duplicate(request_id));
        }
        let index = state.choose(session_id, rank)?;
        state.reserved.insert(request_id.to_owned());
        let member = &mut state.members[index];
        member.open_requests += 1;
        Ok((index, Arc::clone(&member.engine), Reserved { set: self, request_id: request_id.to_owned() }))
    }

    /// A request of the engine at `index` has ended.
    pub fn close_request(&self, index: usize) {
        if let Some(member) = self.state().members.get_mut(index) {
            member.open_requests -= 1;
        }
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.set.state().reserved.remove(&self.request_id);
    }
}

fn duplicate(request_id: &str) -> ApiError {
    let message = format!("request_id \"{request_id}\" is already in use by an open request");
    ApiError::new(Reason::DuplicateRequestId, message).with_param("request_id")
}
