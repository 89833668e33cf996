//! A fork server that stays after a job, for the next one: a *warm* server.
//!
//! It listens at a socket in a folder of its user. A command joins it with a [`Request`], and the server forks a
//! *branch* for it: a fork server of that job alone, which speaks with the engine as any other does. A branch is no
//! descendant of the agent, so it ends everything below itself when the engine hangs up; if it cannot, the warm
//! server does.
//!
//! A worker of a branch must be what an executed worker would be. So command and server have to agree in everything
//! that a process inherits ([`key`]), because imports may read it, and may change it for the workers.

mod branches;
mod door;
mod identity;
mod marks;
mod place;
mod reach;
mod request;

pub use door::{Call, Door};
pub use identity::{digest, key};
pub use marks::{Detail, Marks};
pub use place::{is_in_job, obstacle};
pub use request::{Purpose, Request, ask, join, join_all, listen};
