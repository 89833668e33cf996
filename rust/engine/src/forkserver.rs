//! The fork server: a process that imports the modules of the workers, and then forks a worker for each order.
//!
//! The engine executes it like a worker, in its own process group, and gives it one end of a socket that preserves
//! message boundaries. A worker is the child of the server, so the server waits for the worker and reports how it
//! ended. The engine itself watches the worker's pidfd, so deaths keep the kernel's order.
//!
//! 1. The server sends [`Report::Hello`] with a pidfd of itself, by which the engine knows where the server runs.
//!    Once it has imported, it sends [`Report::Ready`], or [`Report::Refused`]. [`Command::Expect`] tells the server
//!    how many workers will come, and so whether it pays to make forks cheaper.
//! 2. The engine sends [`Command::Start`] with a plan in a file, the worker's streams, and one end of a gate (a
//!    socket). The server forks and sends [`Report::Forked`] with the child's pidfd.
//! 3. The child enters: it takes the same steps as every worker and writes the result into the gate. Then it waits
//!    there until the engine watches its pidfd. No code of the user runs before that.
//! 4. The server looks at a dead worker without reaping it and sends [`Report::Ended`]. The zombie reserves its pid
//!    and process group until [`Command::Reap`], which comes when no process of the group is left.
//!
//! The server ends when the engine hangs up, and the workers end when their server dies. A fork server is never
//! required: without one, the engine executes the worker's command.

mod delivery;
pub(crate) mod estate;
mod imports;
mod link;
mod message;
mod order;
mod pages;
mod server;
mod socket;
mod speaker;
pub mod warm;
mod wire;
mod words;

pub use imports::Patience;
pub use link::Link;
pub use order::Order;

pub(crate) use delivery::{Delivered, Delivery, Ordered};
pub(crate) use estate::Estate;
pub(crate) use message::{Plan, Stderr};
pub(crate) use server::{DEATH_PATIENCE, FORK_PATIENCE, News, Server, State, refusal};
pub(crate) use socket::pair as new_link;
