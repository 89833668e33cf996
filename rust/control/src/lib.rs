//! What the link between the hosts of a job needs. No Python, no sockets: bytes in, bytes out.

mod secure;

pub use secure::{Error, KEY_LEN, MAX_MESSAGE, MAX_PLAIN, Role, Session};
