//! The engine of dsl: starts, watches, signals and ends a group of worker processes.
//!
//! # Theory of operation
//!
//! A [`Supervisor`] lives on one thread and turns round one epoll set. Workers are started by `clone3` with shared
//! memory, at a cost that does not grow with the process that starts them; each comes back with a pidfd, whose
//! readiness is its death. Deaths are taken before anything else and in the kernel's order, so the first failure is
//! the first death. What follows from a fact is decided by a pure state machine; the supervisor carries it out.
//! Nothing is polled: an idle group costs no wake-up.
//!
//! A process tree is ended in tiers: `cgroup.kill` where a cgroup can be had, else passes over the process table
//! that freeze every descendant before they kill, and a search for the job's token in environments where we are not
//! the subreaper. Only processes proved to be of the job are signalled.
//!
//! A worker may also be forked by a process that has imported what the worker needs, see [`forkserver`]. It is watched,
//! signalled and ended like any other; only its status comes from its parent.
//!
//! A [`Guard`] stands above the process that runs the supervisor (the agent): each ends the job if the other dies.
//! Inside somebody's program there is no guard; the [`Handle`] runs the supervisor on a thread of its own, takes no
//! signal and waits for no child but its workers.

#![deny(unsafe_code)]

pub mod affinity;
mod bell;
pub mod cgroup;
pub mod error;
pub mod event;
pub mod features;
pub mod forkserver;
mod group;
mod guard;
mod handle;
mod kernel_file;
pub mod limits;
mod mux;
mod orphans;
mod poller;
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

pub use bell::Bell;
pub use error::Error;
pub use event::Event;
pub use features::Features;
pub use guard::{Agent, Guard, Outcome};
pub use handle::{Handle, Waited};
pub use mux::Flushed;
pub use signals::{Meaning, Refusal, Table};
pub use supervisor::Supervisor;
