//! Decides which worker of a group starts next. A pure state machine: its input is what has happened, its output is
//! what may start.
//!
//! Workers start in the order of their indices. A worker that names a fork server is ordered from it; the others are
//! executed. The supervisor owns processes and descriptors. The rules are here, without system calls and with the
//! time as an argument.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::forkserver::{FORK_PATIENCE, State};

/// How many orders may be open at a time, so that several servers can fork while their children enter.
const ORDERS_AHEAD: usize = 32;
/// How long the first forked worker runs before others are ordered. Rank 0 serves torch's store: if another rank calls
/// before rank 0 listens, torch waits about half a second before it calls again.
const LEAD: Duration = Duration::from_millis(15);

/// What may start now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing: all workers were tried, or we must wait for a fork server.
    Nothing,
    /// Nothing before this time: the first worker has its lead.
    Later(Instant),
    /// Execute this worker.
    Execute(usize),
    /// Order this worker from a fork server.
    Order { worker: usize, server: usize },
}

/// The progress of a group's start. `O` is an order to a fork server.
pub(crate) struct Starting<O> {
    /// The fork server that each worker names.
    servers: Vec<Option<usize>>,
    /// The first worker that was not tried yet.
    next: usize,
    /// Open orders, for the workers from `next` on.
    pub(crate) orders: VecDeque<O>,
    /// When we stop waiting for the first order.
    pub(crate) order_due: Option<Instant>,
    /// When the lead of the first worker is over.
    lead_until: Option<Instant>,
}

impl<O> Starting<O> {
    /// `servers`: the fork server that each worker names.
    pub(crate) fn new(servers: Vec<Option<usize>>) -> Self {
        Self {
            servers,
            next: 0,
            orders: VecDeque::new(),
            order_due: None,
            lead_until: None,
        }
    }

    /// Adds a worker behind the others.
    pub(crate) fn add(&mut self, server: Option<usize>) {
        self.servers.push(server);
    }

    /// What may start now. `states`: the states of the fork servers, by number; a server without a state is closed.
    pub(crate) fn next(&self, states: &[State]) -> Next {
        let state = |server: usize| states.get(server).copied().unwrap_or(State::Closed);
        let mut untried = self.servers[self.next..].iter().flatten();
        // The group starts in one go: otherwise the first workers would wait at a barrier for workers whose fork
        // server still imports.
        if states.contains(&State::Preparing) && untried.any(|server| state(*server) == State::Preparing) {
            return Next::Nothing;
        }
        let worker = self.next + self.orders.len();
        let Some(server) = self.servers.get(worker) else {
            return Next::Nothing;
        };
        if let Some(until) = self.lead_until {
            return Next::Later(until);
        }
        let most = if self.next == 0 { 1 } else { ORDERS_AHEAD };
        match server.filter(|&server| state(server) == State::Ready) {
            Some(server) if self.orders.len() < most => Next::Order { worker, server },
            _ if !self.orders.is_empty() => Next::Nothing,
            _ => Next::Execute(worker),
        }
    }

    /// Notes that the next worker is being executed, even if that fails.
    pub(crate) fn execute(&mut self) {
        self.next += 1;
    }

    /// Counts the workers from this one on as not tried.
    pub(crate) fn take_back(&mut self, untried: usize) {
        self.next = untried;
    }

    /// Ends the lead of the first worker in time.
    pub(crate) fn end_lead(&mut self, now: Instant) {
        self.lead_until = self.lead_until.filter(|until| *until > now);
    }

    /// Notes an order for the next worker.
    pub(crate) fn ordered(&mut self, order: O, now: Instant) {
        self.order_due.get_or_insert(now + FORK_PATIENCE);
        self.orders.push_back(order);
    }

    /// Removes the first order, because it was delivered or has failed. Returns its worker and the order.
    pub(crate) fn delivered(&mut self, now: Instant) -> Option<(usize, O)> {
        let order = self.orders.pop_front()?;
        let worker = self.next;
        if worker == 0 {
            self.lead_until = Some(now + LEAD);
        }
        self.next += 1;
        self.order_due = (!self.orders.is_empty()).then(|| now + FORK_PATIENCE);
        Some((worker, order))
    }

    /// Takes back all open orders: their workers count as not tried.
    pub(crate) fn take_orders(&mut self) -> VecDeque<O> {
        self.order_due = None;
        std::mem::take(&mut self.orders)
    }

    /// Lets no more workers start. Returns the workers that were not tried. Take back the orders before.
    pub(crate) fn cancel(&mut self) -> Range<usize> {
        let untried = self.next..self.servers.len();
        self.next = self.servers.len();
        untried
    }
}

#[cfg(test)]
mod tests;
