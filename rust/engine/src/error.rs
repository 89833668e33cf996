//! Why the engine cannot do what was asked.

use crate::limits::Shortage;
use crate::spec::SpecError;

/// An error of the engine. A worker that fails to start is no error but an event.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The spec cannot be started as written.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A limit of the machine is too low for the group.
    #[error(transparent)]
    Limit(#[from] Shortage),
    /// A worker cannot be bound as asked.
    #[error("{0}")]
    Binding(String),
    /// A group is running already.
    #[error("this supervisor is running a group: wait for its end, or use a second supervisor")]
    Busy,
    /// The kernel would throw the workers' exit statuses away.
    #[error(
        "SIGCHLD is ignored in this process, so exit statuses would be lost: give it its default action first"
    )]
    ChildSignalIgnored,
    /// Whoever waits would wait for ever.
    #[error("this supervisor runs no group: call start first, or wait for a limited time")]
    Idle,
    /// This process is a fork of the one that has the thread and the workers.
    #[error(
        "this supervisor belongs to the process that made it, and is of no use in a forked child: make another"
    )]
    Forked,
    /// The supervisor was closed.
    #[error("this supervisor is closed")]
    Closed,
    /// A limit keeps the engine from making a thread of its own.
    #[error(
        "{0}: the limit of processes and threads is reached, raise it (ulimit -u, pids.max of the control group)"
    )]
    NoThread(&'static str),
    /// The kernel refused something the engine cannot do without.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

impl Error {
    /// For `map_err` on a thread that was not made.
    pub(crate) fn thread(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| {
            if source.kind() == std::io::ErrorKind::WouldBlock {
                Self::NoThread(what)
            } else {
                Self::Os { what, source }
            }
        }
    }

    /// For `map_err` on answers of the standard library and of rustix.
    pub(crate) fn os<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Os {
            what,
            source: error.into(),
        }
    }
}
