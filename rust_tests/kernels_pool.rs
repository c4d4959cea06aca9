//! The pool: every task once, whatever the number of threads, of callers and of nested calls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rollspan_kernels::pool::Pool;

fn counts(pool: &Pool, tasks: usize) -> Vec<usize> {
    let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    pool.run(tasks, |index| {
        counts[index].fetch_add(1, Ordering::Relaxed);
    });
    counts.into_iter().map(AtomicUsize::into_inner).collect()
}

#[test]
fn every_task_runs_once_with_any_number_of_threads() {
    let pool = Pool::new();
    for threads in [1, 3, 8, 2, 0, 4] {
        pool.set_num_threads(threads);
        assert_eq!(pool.num_threads(), threads.max(1));
        for tasks in [0, 1, 2, 7, 1000] {
            assert_eq!(counts(&pool, tasks), vec![1; tasks]);
        }
    }
}

#[test]
fn with_one_thread_the_caller_does_it_in_order() {
    let order = std::sync::Mutex::new(Vec::new());
    let caller = thread::current().id();
    Pool::new().run(5, |index| {
        assert_eq!(thread::current().id(), caller);
        order.lock().unwrap().push(index);
    });
    assert_eq!(order.into_inner().unwrap(), [0, 1, 2, 3, 4]);
}

#[test]
fn callers_at_once_and_nested_calls_all_get_their_tasks_done() {
    let pool = Pool::new();
    pool.set_num_threads(3);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    assert_eq!(counts(&pool, 9), [1; 9]);
                }
            });
        }
    });
    let inner = AtomicUsize::new(0);
    pool.run(4, |_| {
        pool.run(5, |_| {
            inner.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(inner.into_inner(), 20);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
    let pool = Pool::new();
    pool.set_num_threads(3);
    for _ in 0..20 {
        let outcome = catch_unwind(AssertUnwindSafe(|| pool.run(50, |index| assert_ne!(index, 25, "the odd one"))));
        assert!(outcome.is_err());
        assert_eq!(counts(&pool, 50), [1; 50]);
    }
}
