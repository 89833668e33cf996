//! The fork server: a process that has imported what workers import, and forks a worker for each order.
//!
//! The engine executes it like a worker, in a process group of its own, and gives it one end of a socket that keeps
//! messages apart. The worker is the server's child: it is the server that waits for it, and tells how it ended.
//! What the engine sees by itself is the worker's pidfd, so deaths keep the kernel's order.
//!
//! 1. The server says [`Report::Hello`] with a pidfd of its own, by which the engine knows where it runs, and
//!    [`Report::Ready`] once it has imported, or [`Report::Refused`]. [`Command::Expect`] tells it how many workers
//!    will come, and so whether it pays to make forks cheaper.
//! 2. [`Command::Start`] comes with a plan in a file, the worker's streams, and one end of a gate. The server forks
//!    and sends [`Report::Forked`] with the child's pidfd.
//! 3. The child enters: it takes the steps of every worker, writes into the gate how that went, and waits there
//!    until the engine watches its pidfd. No line of the user's runs before.
//! 4. The server looks at a dead worker without reaping it and sends [`Report::Ended`]. The zombie pins the numbers
//!    of process and group until [`Command::Reap`], when nothing of the group is left.
//!
//! Whoever loses the other ends: the server when the engine hangs up, the workers when their server dies. A fork
//! server is never a condition: where there is none, the engine executes the worker's command.

mod delivery;
mod imports;
mod link;
mod message;
mod order;
mod pages;
mod plan;
mod server;
mod socket;
mod speaker;
mod words;

pub use imports::Patience;
pub use link::Link;
pub use order::Order;

pub(crate) use delivery::{Delivered, Delivery, Ends, Ordered};
pub(crate) use plan::{Plan, Stderr};
pub(crate) use server::{DEATH_PATIENCE, FORK_PATIENCE, News, Server, State};
