//! The link between the hosts of a job: sockets, frames, encrypted sessions, heartbeats, and the output of workers. No
//! Python.
//!
//! A [`Hub`] runs on one thread around one epoll set. What decides is pure and has no clock: [`frame`], [`pack`],
//! [`credit`], [`outbox`], [`strangers`], [`Session`]. Messages are bytes here; their owner reads them.

#![deny(unsafe_code)]

mod connect;
pub mod credit;
mod door;
mod face;
pub mod frame;
mod hub;
mod inbox;
mod link;
mod loss;
pub mod outbox;
pub mod pack;
mod relay;
mod secure;
mod server;
pub mod strangers;
mod stream;
mod sync;

pub use connect::{Caller, ConnectError, connect};
pub use face::{Face, Sample};
pub use hub::{Hub, TalkError};
pub use inbox::{News, UNREAD_BYTES, UNREAD_BYTES_OF_ALL};
pub use loss::Loss;
pub use secure::{Error, KEY_LEN, MAX_MESSAGE, MAX_PLAIN, Role, Session};
pub use server::Settings;
pub use stream::{FdError, FdStream, MAGIC, MARK, OPENING_LEN, PREAMBLE_LEN, SecureStream, Stream};
