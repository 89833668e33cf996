//! Which worker of a group starts next, as a pure state machine: what has happened in, what may start out.
//!
//! Workers start in the order of their indices. A worker that names a fork server is ordered from it, all others are
//! executed. The supervisor owns processes and descriptors; the rules are here, without a system call and with the
//! time as an argument.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use crate::forkserver::{FORK_PATIENCE, State};
use crate::procfs::Activity;

mod tokens;

use tokens::Tokens;

/// Orders that are given before the first is delivered: the server forks while its children enter.
const ORDERS_AHEAD: usize = 16;

/// What may start now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing: all were tried, or a fork server has to say something first.
    Nothing,
    /// Nothing: all import tokens are taken. Their holders are to be looked at then.
    Token(Instant),
    /// This worker is to be executed.
    Execute(usize),
    /// This worker is to be ordered from a fork server.
    Order { worker: usize, server: usize },
}

/// How far the start of a group has come. `O` is an order that a fork server has taken.
pub(crate) struct Starting<O> {
    /// The fork server that each worker names.
    servers: Vec<Option<usize>>,
    /// The first worker that was not tried.
    next: usize,
    /// Orders that are not delivered, for the workers from `next` on.
    orders: VecDeque<O>,
    /// The first order is not waited for after this time.
    order_due: Option<Instant>,
    /// Import tokens; `None` without a throttle.
    tokens: Option<Tokens>,
}

impl<O> Starting<O> {
    /// `servers`: the fork server that each worker names. `throttle`: how many executed workers may import at a time.
    pub(crate) fn new(servers: Vec<Option<usize>>, throttle: Option<usize>) -> Self {
        Self {
            servers,
            next: 0,
            orders: VecDeque::new(),
            order_due: None,
            tokens: throttle.map(Tokens::new),
        }
    }

    /// What may start now. `states`: those of the fork servers; one that is not among them is closed.
    pub(crate) fn next(&self, states: &[State]) -> Next {
        let state = |server: usize| states.get(server).copied().unwrap_or(State::Closed);
        let mut untried = self.servers[self.next..].iter().flatten();
        // The group starts in one go: nobody waits at a barrier for workers whose server imports.
        if states.contains(&State::Preparing) && untried.any(|server| state(*server) == State::Preparing) {
            return Next::Nothing;
        }
        let worker = self.next + self.orders.len();
        let Some(server) = self.servers.get(worker) else {
            return Next::Nothing;
        };
        match server.filter(|&server| state(server) == State::Ready) {
            Some(server) if self.orders.len() < ORDERS_AHEAD => Next::Order { worker, server },
            _ if self.has_orders() => Next::Nothing,
            _ => match &self.tokens {
                Some(tokens) if tokens.are_taken() => Next::Token(tokens.due()),
                _ => Next::Execute(worker),
            },
        }
    }

    /// The worker that comes next is being executed, whatever comes of it.
    pub(crate) fn execute(&mut self) {
        self.next += 1;
    }

    /// An executed worker runs: it has a token, where there are tokens.
    pub(crate) fn executed(&mut self, worker: usize, pid: i32, now: Instant) {
        if let Some(tokens) = &mut self.tokens {
            tokens.give(worker, pid, now);
        }
    }

    /// A worker has ended, and its token is free.
    pub(crate) fn ended(&mut self, worker: usize) {
        if let Some(tokens) = &mut self.tokens {
            tokens.take_back(worker);
        }
    }

    /// Frees the tokens of workers that have done their imports, by what is seen of their pids.
    pub(crate) fn look_at_tokens(&mut self, now: Instant, see: impl Fn(i32) -> Option<Activity>) {
        if let Some(tokens) = &mut self.tokens {
            tokens.look(now, see);
        }
    }

    /// The next worker was ordered.
    pub(crate) fn ordered(&mut self, order: O, now: Instant) {
        self.order_due.get_or_insert(now + FORK_PATIENCE);
        self.orders.push_back(order);
    }

    pub(crate) fn has_orders(&self) -> bool {
        !self.orders.is_empty()
    }

    /// When the first order is not waited for any longer.
    pub(crate) fn order_due(&self) -> Option<Instant> {
        self.order_due
    }

    /// The order that is to be delivered first.
    pub(crate) fn first_order(&mut self) -> Option<&mut O> {
        self.orders.front_mut()
    }

    /// The first order is delivered, or was in vain: its worker, and the order.
    pub(crate) fn delivered(&mut self, now: Instant) -> Option<(usize, O)> {
        let order = self.orders.pop_front()?;
        let worker = self.next;
        self.next += 1;
        self.order_due = self.has_orders().then(|| now + FORK_PATIENCE);
        Some((worker, order))
    }

    /// Takes back all orders: their workers have not been tried.
    pub(crate) fn take_orders(&mut self) -> VecDeque<O> {
        self.order_due = None;
        std::mem::take(&mut self.orders)
    }

    /// No worker starts any more: those that were not tried. Orders are to be taken back before.
    pub(crate) fn cancel(&mut self) -> Range<usize> {
        let untried = self.next..self.servers.len();
        self.next = self.servers.len();
        untried
    }
}

#[cfg(test)]
mod tests;
