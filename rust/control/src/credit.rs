//! How much output the agents may send. Pure.
//!
//! A head lets its agents send so much that the output of all of them, on its way or unwritten, stays within a bound.
//! An agent's share depends on the number of agents. It grows after the first output is shown.

/// Bytes that a piece of output counts for in addition to its own: a head needs them to keep the piece.
pub const PIECE_COST: usize = 192;
/// Bytes of output of all agents that may be on their way or wait for the console.
pub const OUTPUT_BYTES: usize = 32 << 20;
/// Most bytes of output that an agent may send before the first of them is shown.
pub const FIRST_WINDOW: usize = 64 << 10;
/// Bytes of output that an agent may always send, however many agents there are.
pub const LEAST_WINDOW: usize = 2 << 10;

/// What a head has granted to one agent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Leave {
    /// Bytes that it may still send, with the cost of each piece.
    pub left: usize,
    /// The same, and the bytes that have arrived and are not written.
    pub outstanding: usize,
}

/// What a head has granted to all agents.
#[derive(Debug, Clone, Copy)]
pub struct Treasury {
    limit: usize,
    /// Bytes that are granted and not written yet.
    pub granted: usize,
}

impl Treasury {
    /// `limit`: see [`OUTPUT_BYTES`].
    pub fn new(limit: usize) -> Self {
        Self { limit, granted: 0 }
    }

    /// Lets an agent, one of `agents`, send more: up to `most`, its share, and what is free. Returns how many bytes.
    pub fn grant(&mut self, leave: &mut Leave, most: usize, agents: usize) -> usize {
        let share = (self.limit / agents.max(1)).max(LEAST_WINDOW);
        let free = self
            .limit
            .saturating_sub(self.granted)
            .max(LEAST_WINDOW.saturating_sub(leave.outstanding));
        let more = share.min(most).saturating_sub(leave.outstanding).min(free);
        let has_enough = leave.outstanding > LEAST_WINDOW / 2 && more < share / 4;
        if has_enough {
            return 0;
        }
        leave.left += more;
        leave.outstanding += more;
        self.granted += more;
        more
    }

    /// Takes leave for a piece that has arrived; false: the agent has sent more than it may.
    pub fn take(leave: &mut Leave, count: usize) -> bool {
        let cost = count + PIECE_COST;
        let may = cost <= leave.left;
        leave.left = leave.left.saturating_sub(cost);
        may
    }

    /// Notes that a piece is written or thrown away. `leave`: that of its agent, if the agent is still there.
    pub fn written(&mut self, leave: Option<&mut Leave>, count: usize) {
        self.granted = self.granted.saturating_sub(count + PIECE_COST);
        if let Some(leave) = leave {
            leave.outstanding = leave.outstanding.saturating_sub(count + PIECE_COST);
        }
    }

    /// Takes back what an agent that has gone did not use.
    pub fn take_back(&mut self, leave: &mut Leave) {
        self.granted = self.granted.saturating_sub(leave.left);
        leave.left = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANY: usize = 10_000;

    /// `count` agents, after three rounds in which each has sent all that it may, has it shown, and may send again.
    fn used(count: usize) -> (Treasury, Vec<Leave>) {
        let mut treasury = Treasury::new(OUTPUT_BYTES);
        let mut leaves = vec![Leave::default(); count];
        for leave in &mut leaves {
            treasury.grant(leave, FIRST_WINDOW, count);
            assert!((LEAST_WINDOW..=FIRST_WINDOW).contains(&leave.left));
        }
        for _ in 0..3 {
            for leave in &mut leaves {
                let size = leave.left - PIECE_COST;
                assert!(Treasury::take(leave, size));
                treasury.written(Some(leave), size);
                treasury.grant(leave, OUTPUT_BYTES, count);
            }
        }
        (treasury, leaves)
    }

    #[test]
    fn the_output_of_all_agents_reaches_its_bound_and_does_not_pass_it() {
        for count in [1, 2, 100, MANY] {
            let (mut treasury, mut leaves) = used(count);
            let held: usize = leaves.iter().map(|leave| leave.outstanding).sum();
            assert!(
                OUTPUT_BYTES * 9 / 10 < held && held <= OUTPUT_BYTES,
                "{count}: {held}"
            );
            assert_eq!(held, treasury.granted);
            for leave in &mut leaves {
                assert_eq!(leave.left, leave.outstanding);
                treasury.take_back(leave);
            }
            assert_eq!(treasury.granted, 0);
        }
    }

    #[test]
    fn each_agent_gets_the_least_window_however_many_come() {
        let mut treasury = Treasury::new(OUTPUT_BYTES);
        for _ in 0..MANY {
            let mut leave = Leave::default();
            treasury.grant(&mut leave, FIRST_WINDOW, 16);
            assert!(leave.left >= LEAST_WINDOW);
        }
        assert!(treasury.granted <= OUTPUT_BYTES + MANY * LEAST_WINDOW);
    }

    #[test]
    fn output_that_is_not_shown_counts_though_its_agent_has_gone_and_come_again() {
        let mut treasury = Treasury::new(OUTPUT_BYTES);
        for _ in 0..MANY {
            let mut leave = Leave::default();
            treasury.grant(&mut leave, FIRST_WINDOW, 1);
            let size = leave.left - PIECE_COST;
            assert!(Treasury::take(&mut leave, size));
            treasury.take_back(&mut leave);
        }
        assert!(treasury.granted <= OUTPUT_BYTES + MANY * LEAST_WINDOW);
    }

    #[test]
    fn empty_pieces_cost_what_it_takes_to_keep_them() {
        let mut treasury = Treasury::new(OUTPUT_BYTES);
        let mut leave = Leave::default();
        treasury.grant(&mut leave, FIRST_WINDOW, 1);
        for _ in 0..FIRST_WINDOW / PIECE_COST {
            assert!(Treasury::take(&mut leave, 0));
        }
        assert!(!Treasury::take(&mut leave, 0));
    }
}
