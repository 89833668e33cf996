//! Errors of the engine.

use crate::limits::Shortage;
use crate::spec::SpecError;

/// An error of the engine. A worker that fails to start is reported as an event, not as an error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The spec cannot be started.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// A limit of the machine is too low for the group.
    #[error(transparent)]
    Limit(#[from] Shortage),
    /// A worker cannot be bound as its spec says.
    #[error("{0}")]
    Binding(String),
    /// A group is running already.
    #[error("this supervisor is running a group: wait for its end, or use a second supervisor")]
    Busy,
    /// The kernel would discard the workers' exit statuses.
    #[error(
        "SIGCHLD is ignored in this process, so exit statuses would be lost: give it its default action first"
    )]
    ChildSignalIgnored,
    /// The group takes no further workers.
    #[error("no worker can be added: this supervisor runs no group, or the group is ending")]
    Ending,
    /// No group runs, so waiting without a limit would never end.
    #[error("this supervisor runs no group: call start first, or wait for a limited time")]
    Idle,
    /// This process is a forked child. The thread and the workers belong to its parent.
    #[error(
        "this supervisor belongs to the process that made it, and is of no use in a forked child: make another"
    )]
    Forked,
    /// The supervisor was closed.
    #[error("this supervisor is closed")]
    Closed,
    /// A limit keeps the engine from starting a thread.
    #[error(
        "{0}: the limit of processes and threads is reached, raise it (ulimit -u, pids.max of the control group)"
    )]
    NoThread(&'static str),
    /// The kernel refused a call that the engine needs.
    #[error("{what}: {source}")]
    Os {
        /// The call or step that failed.
        what: &'static str,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

impl Error {
    /// For `map_err` when a thread could not be started.
    pub(crate) fn thread(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| {
            if source.kind() == std::io::ErrorKind::WouldBlock {
                Self::NoThread(what)
            } else {
                Self::Os { what, source }
            }
        }
    }

    /// For `map_err` on results of the standard library and rustix.
    pub(crate) fn os<E: Into<std::io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Os {
            what,
            source: error.into(),
        }
    }
}
