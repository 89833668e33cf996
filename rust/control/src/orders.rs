//! What the owner of a hub asks its thread for.

use std::sync::Arc;

use crate::face::Face;
use crate::sync::{Bell, Mutex, MutexGuard, Ordering, PoisonError};

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
