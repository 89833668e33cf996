//! Checks numbered lines on stdin, see `dsl_testkit::output`; prints `lines torn misattributed gaps foreign`.

use std::io::{BufRead as _, Read as _, Write as _};

use dsl_testkit::output::Check;

fn main() -> std::io::Result<()> {
    let mut check = Check::default();
    let mut input = std::io::BufReader::with_capacity(1 << 20, std::io::stdin().lock());
    let mut line = Vec::new();
    while input.by_ref().read_until(b'\n', &mut line)? > 0 {
        match line.strip_suffix(b"\n") {
            Some(text) => check.line(text),
            None => check.found.torn += 1,
        }
        line.clear();
    }
    let found = check.found;
    writeln!(
        std::io::stdout(),
        "{} {} {} {} {}",
        found.lines,
        found.torn,
        found.misattributed,
        found.gaps,
        found.foreign
    )
}
