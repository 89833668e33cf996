//! The engine of dsl: starts, watches, signals and ends a group of worker processes.
//!
//! # Theory of operation
//!
//! A [`Supervisor`] runs on one thread, in a loop around one epoll set. Workers are started by `clone3` with shared
//! memory, at a cost that does not grow with the memory of the starting process. Each start returns a pidfd, which
//! becomes readable when the worker dies. Deaths are handled before anything else and in the kernel's order, so the
//! first failure is the first death. A pure state machine decides what follows from a fact, and the supervisor
//! carries out the decision. Nothing is polled: an idle group costs no wake-up.
//!
//! A process tree is killed in tiers. If the job has a cgroup, `cgroup.kill` kills it. Otherwise passes over the
//! process table stop every descendant before they kill. If we are not the subreaper, the passes also search all
//! environments for the job's token. Only processes that provably belong to the job are signalled.
//!
//! A worker may also be forked by a process that has already imported the worker's modules, see [`forkserver`]. Such
//! a worker is watched, signalled and ended like any other; only its exit status comes from its parent.
//!
//! A [`Guard`] is the parent of the process that runs the supervisor (the agent): each ends the job if the other
//! dies. Inside a user's program there is no guard; the [`Handle`] runs the supervisor on a separate thread, takes no
//! signals and waits for no children except its workers.

#![deny(unsafe_code)]

pub mod affinity;
pub mod cgroup;
mod clearing;
pub mod error;
pub mod event;
pub mod features;
mod folder;
pub mod forkserver;
mod group;
mod guard;
mod handle;
mod kernel_file;
mod limits;
mod mux;
mod orphans;
pub mod os;
pub mod peer;
pub mod poller;
pub mod ports;
pub mod procfs;
mod signals;
mod spawn;
pub mod spec;
mod stage;
mod starting;
mod supervisor;
mod sys;
mod token;
mod tree;

pub use error::Error;
pub use event::Event;
pub use features::Features;
pub use guard::{Agent, Guard, Outcome};
pub use handle::{Handle, Waited};
pub use mux::{Display, Flushed, Progress, Recent, Tee, can_move_cursor, relayed};
pub use poller::Bell;
pub use signals::{Meaning, Refusal, Table};
pub use supervisor::Supervisor;
