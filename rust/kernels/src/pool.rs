//! A persistent pool of threads. The caller takes part; idle threads park; results never depend on the thread count.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

/// A pool; [`pool`] is the one that kernels share.
///
/// [`Pool::run`] from several threads at once, or from within a task, is allowed: one gets the workers, the others do
/// their own tasks alone.
pub struct Pool {
    shared: Arc<Shared>,
    /// Held by the caller that has the workers.
    turn: Mutex<()>,
    threads: AtomicUsize,
}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    done: Condvar,
}

#[derive(Default)]
struct State {
    job: Option<Job>,
    /// Goes up with each job, so that no worker enters one twice.
    generation: u64,
    /// Workers inside the job.
    active: usize,
    /// Workers that live; those of a higher index end.
    workers: usize,
    panic: Option<Box<dyn Any + Send>>,
}

/// Lives as long as the call of `run` that made it: that returns only when no worker is inside.
#[derive(Clone, Copy)]
struct Job {
    task: *const (dyn Fn(usize) + Sync),
    next: *const AtomicUsize,
    tasks: usize,
}

// SAFETY: the task is `Sync`, the counter atomic, and both outlive the job.
unsafe impl Send for Job {}

impl Job {
    /// Takes tasks until none is left.
    ///
    /// # Safety
    /// The call of `run` that made the job has not returned.
    unsafe fn work(self) {
        // SAFETY: the caller's promise.
        let (task, next) = unsafe { (&*self.task, &*self.next) };
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= self.tasks {
                return;
            }
            task(index);
        }
    }
}

impl Shared {
    /// A panic while it is held is impossible, so a poisoned lock is as good as any.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn worker(&self, index: usize) {
        let mut seen = 0;
        let mut state = self.lock();
        loop {
            if index >= state.workers {
                return;
            }
            let job = match state.job {
                Some(job) if state.generation != seen => job,
                _ => {
                    state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
            };
            seen = state.generation;
            state.active += 1;
            drop(state);
            // SAFETY: `run` waits until no worker is active.
            let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { job.work() }));
            state = self.lock();
            state.active -= 1;
            if let Err(panic) = outcome {
                state.panic = Some(panic);
            }
            if state.active == 0 {
                self.done.notify_one();
            }
        }
    }
}

impl Default for Pool {
    fn default() -> Self {
        Self::new()
    }
}

impl Pool {
    /// A pool of one thread, the caller.
    pub fn new() -> Self {
        let shared = Shared { state: Mutex::default(), wake: Condvar::new(), done: Condvar::new() };
        Self { shared: Arc::new(shared), turn: Mutex::new(()), threads: AtomicUsize::new(1) }
    }

    /// Threads that work on a job, the caller included.
    pub fn num_threads(&self) -> usize {
        self.threads.load(Ordering::Relaxed)
    }

    /// Changes the number of threads, the caller included; 0 counts as 1. Where the system refuses more threads, there
    /// are fewer. Waits for a running job.
    pub fn set_num_threads(&self, threads: usize) {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.shared.lock();
        let wanted = threads.max(1) - 1;
        for index in state.workers..wanted {
            let shared = Arc::clone(&self.shared);
            let name = format!("rollspan-kernel-{index}");
            // A worker needs the lock to look at the count, so it sees the new one.
            if thread::Builder::new().name(name).spawn(move || shared.worker(index)).is_err() {
                state.workers = index;
                self.threads.store(index + 1, Ordering::Relaxed);
                return;
            }
        }
        state.workers = wanted;
        self.threads.store(wanted + 1, Ordering::Relaxed);
        self.shared.wake.notify_all();
        drop(state);
        drop(turn);
    }

    /// Calls `task(0)` to `task(tasks - 1)`, each once, on any thread, in any order; returns when all are done.
    ///
    /// # Panics
    /// When a task panics, once no other task is running; tasks may then have been left out.
    pub fn run(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        let alone = || (0..tasks).for_each(&task);
        if tasks <= 1 || self.num_threads() == 1 {
            return alone();
        }
        let Ok(turn) = self.turn.try_lock() else {
            return alone();
        };
        let next = AtomicUsize::new(0);
        let erased: &(dyn Fn(usize) + Sync) = &task;
        // SAFETY: only the lifetime changes; the job is gone before this function returns.
        let erased: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(erased) };
        let job = Job { task: erased, next: &raw const next, tasks };
        let workers = {
            let mut state = self.shared.lock();
            state.job = Some(job);
            state.generation += 1;
            state.workers
        };
        for _ in 0..workers.min(tasks - 1) {
            self.shared.wake.notify_one();
        }
        // SAFETY: this call has not returned.
        let outcome = catch_unwind(AssertUnwindSafe(|| unsafe { job.work() }));
        let mut state = self.shared.lock();
        state.job = None;
        // Only workers that entered are waited for: one that wakes late finds no job.
        while state.active > 0 {
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let panic = state.panic.take().or(outcome.err());
        drop(state);
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().workers = 0;
        self.shared.wake.notify_all();
    }
}

/// The pool that all kernels of the process share.
pub fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    POOL.get_or_init(Pool::new)
}
