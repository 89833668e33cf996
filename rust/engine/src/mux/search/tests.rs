use super::*;
use crate::mux::file::tests::Scratch;

fn search(scratch: &Scratch, word: &[u8]) -> Search {
    Search {
        kind: Kind::Stdout,
        words: vec![memmem::Finder::new(word).into_owned()],
        file: scratch.file(None),
        failure: None,
    }
}

#[test]
fn a_stream_without_line_feeds_is_searched_in_pieces_and_not_kept() {
    let scratch = Scratch::new();
    let mut searches = [search(&scratch, b"99 %")];
    let mut lines = Lines::default();
    let bar = [&vec![b'x'; 64 * 1024][..], b"\r"].concat();
    for _ in 0..3 * LINE_BYTES / bar.len() {
        lines.search(&mut searches, Kind::Stdout, b"[rank 0] ", &bar);
        assert!(lines.0.len() <= LINE_BYTES);
    }
    lines.search(&mut searches, Kind::Stdout, b"[rank 0] ", b"\r99 %");
    lines.finish(&mut searches, Kind::Stdout, b"[rank 0] ");
    let kept = scratch.read();
    assert!(kept.starts_with(b"[rank 0] ") && kept.ends_with(b"\r99 %\n"));
    assert!(kept.len() <= LINE_BYTES);
}
