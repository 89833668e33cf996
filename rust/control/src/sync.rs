//! What threads of a hub meet at. `tests/schedules.rs` puts other primitives in place of these.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

pub(crate) use dsl_engine::Bell;
