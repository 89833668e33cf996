//! What the owner of a hub and its thread share: a link as both see it, what the owner asks for, and numbers that it
//! waits for.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::frame::Pong;
use crate::outbox::Outbox;
use crate::sync::{
    AtomicBool, AtomicI64, AtomicUsize, Bell, Condvar, Mutex, MutexGuard, Ordering, PoisonError,
};

/// Measurements that are kept; the oldest goes first.
const SAMPLES: usize = 8;
/// How often a waiting thread looks for signals.
pub(crate) const SLICE: Duration = Duration::from_millis(100);

/// Where a connection has come from, and to which of our ports.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    pub(crate) from: SocketAddr,
    pub(crate) port: u16,
    /// Whether callers must have a job key of the user; `None`: it is not checked.
    pub(crate) keyed: Option<bool>,
}

impl Origin {
    /// The caller's address without its port.
    pub(crate) fn ip(&self) -> IpAddr {
        self.from.ip().to_canonical()
    }

    /// `HOST:PORT`, with an IPv6 address in brackets.
    pub(crate) fn address(&self) -> String {
        SocketAddr::new(self.ip(), self.from.port()).to_string()
    }

    /// Whether only one agent may come for a place. Where members come by themselves, the owner of the hub decides.
    pub(crate) fn has_fixed_places(&self) -> bool {
        self.keyed.is_none()
    }
}

/// An answered heartbeat.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// The answer.
    pub pong: Pong,
    /// When it came back in nanoseconds: by the clock of the day, and by a clock that never steps.
    pub back_real: u64,
    /// See `back_real`.
    pub back: u64,
}

/// What all threads may know of a link and do with it.
#[derive(Debug, Default)]
pub struct Face {
    pub(crate) id: u64,
    /// Name of the other side, as the user knows it.
    pub name: String,
    /// How it came in; `None`: we have made the connection, or were given it.
    pub(crate) origin: Option<Origin>,
    /// Our address at this end; empty: another program has made the connection.
    pub own_address: String,
    pub(crate) place: AtomicI64,
    pub(crate) is_lost: AtomicBool,
    pub(crate) is_closing: AtomicBool,
    /// Whether we do not read because too many of its messages are unread.
    pub(crate) is_paused: AtomicBool,
    /// Whether the thread was told to look at it.
    pub(crate) is_called: AtomicBool,
    /// Bytes of unread messages, with the cost of each.
    pub(crate) unread: AtomicUsize,
    outbox: Mutex<Outbox>,
    samples: Mutex<VecDeque<Sample>>,
}

impl Face {
    pub(crate) fn new(
        id: u64,
        name: String,
        place: i64,
        origin: Option<Origin>,
        own_address: String,
    ) -> Self {
        Self {
            id,
            name,
            origin,
            own_address,
            place: AtomicI64::new(place),
            ..Self::default()
        }
    }

    /// Our port at which it came in; 0: it did not.
    pub fn port(&self) -> u16 {
        self.origin.map_or(0, |origin| origin.port)
    }

    /// Node rank or rank of the agent there; -1: not known, or the other side is the head.
    pub fn place(&self) -> i64 {
        self.place.load(Ordering::SeqCst)
    }

    /// Changes the place.
    pub fn set_place(&self, place: i64) {
        self.place.store(place, Ordering::SeqCst);
    }

    /// Whether the connection has ended.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::SeqCst)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::SeqCst)
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::SeqCst)
    }

    /// Takes the measurements that have come since the last call, the oldest first.
    pub fn take_samples(&self) -> Vec<Sample> {
        self.samples().drain(..).collect()
    }

    pub(crate) fn note(&self, sample: Sample) {
        let mut samples = self.samples();
        if samples.len() == SAMPLES {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    fn samples(&self) -> MutexGuard<'_, VecDeque<Sample>> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn outbox(&self) -> MutexGuard<'_, Outbox> {
        // Each statement under the lock leaves the outbox consistent, so a panic does no harm.
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A queue for any thread. The bell is rung while there is something in it.
pub(crate) struct Orders<Order> {
    bell: Arc<Bell>,
    state: Mutex<State<Order>>,
}

struct State<Order> {
    orders: Vec<Order>,
    /// Links that need attention.
    called: Vec<Arc<Face>>,
    is_over: bool,
}

impl<Order> Orders<Order> {
    pub(crate) fn new(bell: Arc<Bell>) -> Self {
        let state = State {
            orders: Vec::new(),
            called: Vec::new(),
            is_over: false,
        };
        Self {
            bell,
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<Order>> {
        // Each statement under the lock leaves the state consistent, so a panic does no harm.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues an order. If no thread takes it any more, it is dropped.
    pub(crate) fn give(&self, order: Order) {
        let mut state = self.lock();
        if !state.is_over {
            state.orders.push(order);
            drop(state);
            self.bell.ring();
        }
    }

    /// Queues a message for a link, unless the link is lost or being closed.
    pub(crate) fn send(&self, face: &Arc<Face>, payload: &[u8]) {
        if !face.is_closing() {
            face.outbox().message(payload);
            self.call(face);
        }
    }

    /// Lets the thread send what a link has queued, and then end the link.
    pub(crate) fn close(&self, face: &Arc<Face>) {
        face.is_closing.store(true, Ordering::SeqCst);
        self.call(face);
    }

    /// Lets the thread look at a link.
    pub(crate) fn call(&self, face: &Arc<Face>) {
        if !face.is_called.swap(true, Ordering::SeqCst) {
            self.lock().called.push(Arc::clone(face));
            self.bell.ring();
        }
    }

    /// Takes all orders and the links that need attention, the orders to be carried out first.
    pub(crate) fn take(&self) -> (Vec<Order>, Vec<Arc<Face>>) {
        self.bell.silence();
        let mut state = self.lock();
        let taken = (
            std::mem::take(&mut state.orders),
            std::mem::take(&mut state.called),
        );
        drop(state);
        for face in &taken.1 {
            // Before the thread looks at the link: what comes later calls again.
            face.is_called.store(false, Ordering::SeqCst);
        }
        taken
    }

    /// Takes no orders any more, and drops those that wait.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.is_over = true;
        let left = std::mem::take(&mut state.orders);
        drop(state);
        drop(left);
    }

    /// Takes back the orders that fit, as long as no thread has taken them.
    pub(crate) fn retract(&self, is_it: impl Fn(&Order) -> bool) {
        self.lock().orders.retain(|order| !is_it(order));
    }
}

/// A number that threads wait for to become zero.
#[derive(Debug, Default)]
pub(crate) struct Count {
    number: Mutex<usize>,
    zero: Condvar,
}

impl Count {
    fn lock(&self) -> MutexGuard<'_, usize> {
        // Each statement under the lock leaves the number true, so a panic does no harm.
        self.number.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self) {
        *self.lock() += 1;
    }

    pub(crate) fn take(&self) {
        let mut number = self.lock();
        *number -= 1;
        if *number == 0 {
            self.zero.notify_all();
        }
    }

    /// Waits until the number is zero; false: the time was over first, or `pending` has returned true.
    pub(crate) fn wait(&self, timeout: Option<Duration>, mut pending: impl FnMut() -> bool) -> bool {
        let begin = Instant::now();
        loop {
            let left = timeout.map_or(SLICE, |timeout| timeout.saturating_sub(begin.elapsed()));
            let waited = self
                .zero
                .wait_timeout_while(self.lock(), left.min(SLICE), |number| *number > 0);
            let (number, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if *number == 0 {
                return true;
            }
            drop(number); // `pending` may call anything
            if left.is_zero() || pending() {
                return false;
            }
        }
    }
}

/// One of the things that a [`Count`] counts, until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted(Arc<Count>);

impl Counted {
    pub(crate) fn new(count: &Arc<Count>) -> Self {
        count.add();
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.take();
    }
}
