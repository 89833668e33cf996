use std::time::Duration;

use proptest::prelude::*;

use super::*;

const READY: State = State::Ready;
const IMPORTS: State = State::Preparing;
const GONE: State = State::Closed;

/// Starts everything that may start. Returns the workers in the order in which they were tried.
fn start_all(starting: &mut Starting<usize>, states: &[State], now: Instant) -> Vec<(&'static str, usize)> {
    let mut done = Vec::new();
    loop {
        match starting.next(states) {
            Next::Nothing | Next::Later(_) => return done,
            Next::Execute(worker) => {
                starting.execute();
                done.push(("executed", worker));
            }
            Next::Order { worker, .. } => {
                starting.ordered(worker, now);
                done.push(("ordered", worker));
            }
        }
    }
}

#[test]
fn each_worker_starts_as_its_fork_server_allows() {
    let now = Instant::now();
    let executed = |workers: &[usize]| workers.iter().map(|&worker| ("executed", worker)).collect();
    let ordered = |workers: &[usize]| workers.iter().map(|&worker| ("ordered", worker)).collect();
    let mixed = vec![("executed", 0), ("ordered", 1), ("ordered", 2)];
    for (servers, states, expected) in [
        (vec![None; 3], vec![], executed(&[0, 1, 2])),
        // We do not wait for a server that no worker names.
        (vec![None; 3], vec![IMPORTS], executed(&[0, 1, 2])),
        // The first worker is ahead of the others.
        (vec![Some(0); 3], vec![READY], ordered(&[0])),
        (vec![Some(0); 3], vec![GONE], executed(&[0, 1, 2])),
        (vec![Some(3)], vec![READY], executed(&[0])),
        // The group starts in one go.
        (vec![None, Some(0)], vec![IMPORTS], vec![]),
        (vec![Some(0), Some(1)], vec![READY, IMPORTS], vec![]),
        (vec![Some(0), Some(1)], vec![READY, READY], ordered(&[0])),
        (vec![None, Some(0), Some(0)], vec![READY], mixed),
        // Workers start in the order of their indices, so an executed worker waits for earlier orders.
        (vec![Some(0), None], vec![READY], ordered(&[0])),
        (vec![Some(0), Some(1)], vec![READY, GONE], ordered(&[0])),
    ] {
        let mut starting = Starting::new(servers.clone());
        assert_eq!(
            start_all(&mut starting, &states, now),
            expected,
            "{servers:?} {states:?}"
        );
    }
}

#[test]
fn orders_are_given_a_few_ahead_and_taken_back_by_the_workers_that_they_were_for() {
    let now = Instant::now();
    let mut starting = Starting::new(vec![Some(0); ORDERS_AHEAD + 3]);
    assert_eq!(start_all(&mut starting, &[READY], now), [("ordered", 0)]);
    assert_eq!(starting.delivered(now), Some((0, 0)));
    starting.end_lead(now + LEAD);
    assert_eq!(start_all(&mut starting, &[READY], now).len(), ORDERS_AHEAD);
    assert_eq!(starting.order_due, Some(now + FORK_PATIENCE));
    let later = now + Duration::from_secs(1);
    assert_eq!(starting.delivered(later), Some((1, 1)));
    assert_eq!(starting.order_due, Some(later + FORK_PATIENCE));
    assert_eq!(
        start_all(&mut starting, &[READY], later),
        [("ordered", ORDERS_AHEAD + 1)]
    );
    assert_eq!(starting.take_orders().len(), ORDERS_AHEAD);
    assert_eq!((starting.order_due, !starting.orders.is_empty()), (None, false));
    // The server is closed: all but the delivered workers are executed.
    assert_eq!(start_all(&mut starting, &[GONE], later).len(), ORDERS_AHEAD + 1);
    assert_eq!(starting.cancel(), ORDERS_AHEAD + 3..ORDERS_AHEAD + 3);
}

#[test]
fn the_first_forked_worker_has_a_lead() {
    let now = Instant::now();
    let mut starting = Starting::new(vec![Some(0); 2]);
    start_all(&mut starting, &[READY], now);
    assert_eq!(starting.next(&[READY]), Next::Nothing, "it does not run yet");
    starting.delivered(now);
    starting.end_lead(now + LEAD / 2);
    assert_eq!(starting.next(&[READY]), Next::Later(now + LEAD));
    starting.end_lead(now + LEAD);
    assert_eq!(start_all(&mut starting, &[READY], now), [("ordered", 1)]);
    let mut alone = Starting::new(vec![Some(0)]);
    start_all(&mut alone, &[READY], now);
    alone.delivered(now);
    assert_eq!(alone.next(&[READY]), Next::Nothing, "nobody wakes up for it");
}

#[test]
fn nothing_starts_behind_a_cancel() {
    let now = Instant::now();
    let mut starting = Starting::new(vec![None, Some(0), Some(0)]);
    assert_eq!(start_all(&mut starting, &[READY], now).len(), 3);
    assert_eq!(starting.take_orders(), [1, 2]);
    assert_eq!(starting.cancel(), 1..3);
    assert_eq!(starting.next(&[READY]), Next::Nothing);
    assert_eq!(starting.cancel(), 3..3);
}

/// Something that happens while a group starts.
#[derive(Debug, Clone)]
enum Happening {
    /// The supervisor starts a worker if one may start.
    Turn,
    /// The first order is delivered.
    Deliver,
    /// A fork server becomes ready, or closes. If it closes, its orders are taken back.
    Ready(usize),
    Close(usize),
    Cancel,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        8 => Just(Happening::Turn),
        6 => Just(Happening::Deliver),
        2 => (0..3_usize).prop_map(Happening::Ready),
        1 => (0..3_usize).prop_map(Happening::Close),
        1 => Just(Happening::Cancel),
    ]
}

proptest! {
    /// For any events in any order: each worker is tried exactly once, in the order of the indices, executed or
    /// ordered as its fork server allows. There are never more orders than allowed.
    #[test]
    fn every_worker_is_tried_once_and_in_its_turn(
        servers in prop::collection::vec(prop::option::of(0..3_usize), 0..40),
        history in prop::collection::vec(happening(), 0..200),
    ) {
        let now = Instant::now();
        let mut starting = Starting::new(servers.clone());
        let mut states = [IMPORTS; 3];
        let mut tried = 0;
        let mut is_cancelled = false;
        // At the end all open orders are delivered.
        let end = (0..3).map(Happening::Ready).chain(
            (0..40).flat_map(|_| [Happening::Turn, Happening::Deliver]),
        );
        for one in history.into_iter().chain(end.clone()).chain(end) {
            match one {
                Happening::Turn => match starting.next(&states) {
                    Next::Nothing => {}
                    Next::Later(_) => prop_assert!(starting.lead_until.take().is_some()),
                    Next::Execute(worker) => {
                        prop_assert_eq!(worker, tried);
                        prop_assert!(servers[worker].is_none_or(|server| states[server] == GONE));
                        prop_assert!(starting.orders.is_empty());
                        starting.execute();
                        tried += 1;
                    }
                    Next::Order { worker, server } => {
                        prop_assert_eq!((servers[worker], states[server]), (Some(server), READY));
                        prop_assert_eq!(worker, tried + starting.orders.len());
                        starting.ordered(server, now);
                        prop_assert!(starting.orders.len() <= ORDERS_AHEAD);
                    }
                },
                Happening::Deliver => {
                    if let Some((worker, server)) = starting.delivered(now) {
                        prop_assert_eq!((worker, servers[worker]), (tried, Some(server)));
                        tried += 1;
                    }
                }
                Happening::Ready(server) if states[server] == IMPORTS => states[server] = READY,
                Happening::Ready(_) => {}
                Happening::Close(server) => {
                    states[server] = GONE;
                    starting.take_orders();
                }
                Happening::Cancel => {
                    starting.take_orders();
                    prop_assert_eq!(starting.cancel(), tried..servers.len());
                    tried = servers.len();
                    is_cancelled = true;
                }
            }
            prop_assert_eq!(!starting.orders.is_empty(), starting.order_due.is_some());
            prop_assert!(!is_cancelled || starting.next(&states) == Next::Nothing);
        }
        prop_assert_eq!(tried, servers.len());
    }
}
