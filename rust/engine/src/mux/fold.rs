//! Joins equal lines of several workers into one line with a count.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// How long a line waits for equal lines of other workers.
const WINDOW: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct Folded {
    pub(super) text: Vec<u8>,
    pub(super) streams: Vec<usize>,
    since: Instant,
    number: u64,
    /// Whether every stream has brought this line.
    complete: bool,
}

/// Lines that wait for equal lines.
#[derive(Debug, Default)]
pub(super) struct Fold {
    waiting: VecDeque<Folded>,
    /// The number of the last entry with each text.
    numbers: HashMap<Vec<u8>, u64>,
    next: u64,
}

impl Fold {
    /// Adds a line. `streams`: how many streams may bring the same line.
    pub(super) fn add(&mut self, stream: usize, text: &[u8], now: Instant, streams: usize) {
        let first = self.waiting.front().map_or(self.next, |folded| folded.number);
        if let Some(&number) = self.numbers.get(text)
            && number >= first
            && let Some(folded) = self.waiting.get_mut((number - first) as usize)
            && !folded.streams.contains(&stream)
        {
            folded.streams.push(stream);
            folded.complete = folded.streams.len() >= streams;
            return;
        }
        let number = self.next;
        self.next += 1;
        self.numbers.insert(text.to_vec(), number);
        self.waiting.push_back(Folded {
            text: text.to_vec(),
            streams: vec![stream],
            since: now,
            number,
            complete: streams <= 1,
        });
    }

    /// Takes the lines that have waited long enough; with `None` all lines. They come in the order of their first
    /// copies.
    pub(super) fn take(&mut self, now: Option<Instant>) -> Vec<Folded> {
        let mut ready = Vec::new();
        while let Some(folded) = self.waiting.front() {
            let over = now.is_none_or(|now| folded.since + WINDOW <= now);
            if !over && !folded.complete {
                break;
            }
            let Some(folded) = self.waiting.pop_front() else {
                break;
            };
            if self.numbers.get(&folded.text) == Some(&folded.number) {
                self.numbers.remove(&folded.text);
            }
            ready.push(folded);
        }
        ready
    }

    pub(super) fn due(&self) -> Option<Instant> {
        let wait = |folded: &Folded| if folded.complete { Duration::ZERO } else { WINDOW };
        self.waiting.front().map(|folded| folded.since + wait(folded))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(folded: &[Folded]) -> Vec<(String, Vec<usize>)> {
        let text = |folded: &Folded| String::from_utf8(folded.text.clone()).unwrap();
        folded
            .iter()
            .map(|folded| (text(folded), folded.streams.clone()))
            .collect()
    }

    #[test]
    fn what_everybody_says_comes_at_once_and_once() {
        let (mut fold, now) = (Fold::default(), Instant::now());
        fold.add(0, b"hello", now, 2);
        assert_eq!(texts(&fold.take(Some(now))), []);
        fold.add(1, b"hello", now, 2);
        assert_eq!(texts(&fold.take(Some(now))), [("hello".to_owned(), vec![0, 1])]);
        assert_eq!(fold.due(), None);
    }

    #[test]
    fn what_one_says_twice_stays_twice_and_in_order() {
        let (mut fold, now) = (Fold::default(), Instant::now());
        for text in [&b"a"[..], b"a", b"b"] {
            fold.add(0, text, now, 3);
        }
        fold.add(1, b"a", now, 3);
        assert_eq!(fold.due(), Some(now + WINDOW));
        let all = texts(&fold.take(Some(now + WINDOW)));
        let a = "a".to_owned();
        assert_eq!(
            all,
            [(a.clone(), vec![0]), (a, vec![0, 1]), ("b".to_owned(), vec![0])]
        );
    }

    #[test]
    fn one_worker_alone_never_waits() {
        let (mut fold, now) = (Fold::default(), Instant::now());
        fold.add(0, b"x", now, 1);
        assert_eq!(texts(&fold.take(Some(now))), [("x".to_owned(), vec![0])]);
    }
}
