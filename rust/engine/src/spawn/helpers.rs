//! Threads that start the workers of large groups beside the engine's own thread.
//!
//! A clone that shares our memory blocks its thread until the worker's program runs, so several threads start a
//! group sooner. The threads stay as long as the group: the kernel kills a worker when the thread that has started it
//! ends.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{JoinHandle, available_parallelism};
use std::time::SystemTime;

use super::{AttemptContext, EnvTable, Spawner, Started};
use crate::cgroup::Cgroup;
use crate::event::StartFailure;
use crate::os::spawn_quiet;
use crate::poller::Poller;
use crate::spec::LaunchSpec;

/// Threads that start workers, the engine's own included. More gain nothing: the kernel's locks are the limit.
pub(crate) const MOST_THREADS: usize = 4;
/// Each thread beyond the second pays only with so many workers.
const WORKERS_EACH: usize = 64;

/// Facts about a group that the start of each worker needs, for all threads.
pub(crate) struct Shared {
    pub(crate) spec: Arc<LaunchSpec>,
    pub(crate) env: Arc<EnvTable>,
    pub(crate) cgroup: Option<Arc<Cgroup>>,
    pub(crate) foreground_group: Option<i32>,
    pub(crate) poller: Arc<Poller>,
    /// The token of each worker's death.
    pub(crate) token: fn(usize) -> u64,
}

/// How the start of a worker has gone, and when.
pub(crate) struct Outcome {
    pub(crate) worker: usize,
    pub(crate) result: Result<Started, StartFailure>,
    pub(crate) time: SystemTime,
}

/// The threads of a group.
#[derive(Default)]
pub(crate) struct Helpers(Vec<Helper>);

struct Helper {
    /// `None` once it shall end.
    tasks: Option<Sender<Task>>,
    thread: Option<JoinHandle<()>>,
}

/// What a helper is to do with its spawner.
type Task = Box<dyn FnOnce(&mut Spawner) + Send>;

impl Helpers {
    /// Makes as many threads as are of use for so many workers, beside the one of `spawner`. Fewer are fine.
    pub(crate) fn prepare(&mut self, spawner: &Spawner, workers: usize) {
        let most = (workers / WORKERS_EACH).clamp(2, MOST_THREADS);
        let useful = || available_parallelism().map_or(1, usize::from).min(most);
        let threads = spawner.features.threads.unwrap_or_else(useful);
        while self.0.len() + 1 < threads {
            let Ok(mut own) = spawner.twin() else { return };
            let (tasks, inbox) = channel::<Task>();
            let body = move || inbox.iter().for_each(|task| task(&mut own));
            let Ok(thread) = spawn_quiet("dsl-start", body) else {
                return;
            };
            self.0.push(Helper {
                tasks: Some(tasks),
                thread: Some(thread),
            });
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Lets all threads start these workers.
    pub(crate) fn begin(&self, own: &Spawner, shared: Shared, workers: Range<usize>) -> Batch {
        let mask = own.mask;
        let Range { start: first, end } = workers;
        let work = Arc::new(Work {
            shared,
            next: AtomicUsize::new(first),
            end,
        });
        let (sender, inbox) = channel();
        for helper in &self.0 {
            let (work, sender) = (Arc::clone(&work), sender.clone());
            helper.send(Box::new(move |spawner| {
                spawner.mask = mask;
                while let Some(outcome) = work.start_next(spawner) {
                    // Fails only if the batch is gone, which waits for all outcomes.
                    let _ = sender.send(outcome);
                }
            }));
        }
        Batch {
            work,
            inbox,
            early: BTreeMap::new(),
            first,
        }
    }
}

impl Helper {
    fn send(&self, task: Task) {
        if let Some(tasks) = &self.tasks {
            // Fails only if the thread has ended, which it does not before its owner.
            let _ = tasks.send(task);
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            // It ends by a panic only after one of ours.
            let _ = thread.join();
        }
    }
}

struct Work {
    shared: Shared,
    next: AtomicUsize,
    end: usize,
}

impl Work {
    /// Starts the next worker that no other thread has taken; `None` if all are taken, or if one has failed to start.
    fn start_next(&self, spawner: &mut Spawner) -> Option<Outcome> {
        let worker = self.next.fetch_add(1, Ordering::Relaxed);
        (worker < self.end).then(|| {
            let shared = &self.shared;
            let context = AttemptContext {
                env: &shared.env,
                cgroup: shared.cgroup.as_deref(),
                foreground_group: shared.foreground_group,
                poller: &shared.poller,
            };
            let result = spawner.start(&shared.spec, worker, (shared.token)(worker), &context);
            let time = SystemTime::now();
            if result.is_err() {
                self.next.fetch_max(self.end, Ordering::Relaxed);
            }
            Outcome { worker, result, time }
        })
    }
}

/// Workers that several threads start.
pub(crate) struct Batch {
    work: Arc<Work>,
    inbox: Receiver<Outcome>,
    /// Outcomes that have come before that of an earlier worker.
    early: BTreeMap<usize, Outcome>,
    /// The worker whose outcome comes next. After the last outcome: the first worker that was not tried.
    pub(crate) first: usize,
}

impl Batch {
    /// The next outcome in the order of the workers; `None` after the last, and after those that were being started
    /// when one failed. This thread starts workers, too, as long as some are left.
    pub(crate) fn next(&mut self, own: &mut Spawner) -> Option<Outcome> {
        while self.first < self.work.end {
            self.early
                .extend(self.inbox.try_iter().map(|outcome| (outcome.worker, outcome)));
            if let Some(outcome) = self.early.remove(&self.first) {
                self.first += 1;
                return Some(outcome);
            }
            let outcome = self.work.start_next(own).or_else(|| self.inbox.recv().ok())?;
            self.early.insert(outcome.worker, outcome);
        }
        None
    }
}

#[cfg(test)]
mod tests;
