//! What tells files from their later versions. A server looks at thousands of files before each job.

use std::path::{Path, PathBuf};

use rustix::fs::{FileType, stat};

/// How exactly files are told from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Whether a path leads to something, and to what kind of file.
    Kind,
    /// Also the file itself and its state: inode, size, and the times of the last change of content and of state. Nobody
    /// can set the latter.
    State,
}

/// A file as it was; `None` if it could not be seen.
type Mark = Option<(FileType, [i64; 6])>;

/// Files as they were when they were marked.
#[derive(Debug)]
pub struct Marks {
    files: Vec<(PathBuf, Mark)>,
    detail: Detail,
}

impl Marks {
    /// Marks files as they are now.
    pub fn new(paths: Vec<PathBuf>, detail: Detail) -> Self {
        let marked = |path: PathBuf| {
            let mark = mark_of(&path, detail);
            (path, mark)
        };
        Self {
            files: paths.into_iter().map(marked).collect(),
            detail,
        }
    }

    /// The paths that do not lead to what they led to.
    pub fn changed(&self) -> Vec<&Path> {
        let is_other = |(path, mark): &&(PathBuf, Mark)| mark_of(path, self.detail) != *mark;
        self.files
            .iter()
            .filter(is_other)
            .map(|(path, _)| path.as_path())
            .collect()
    }

    /// The files whose state had changed at this time or later when they were marked: in nanoseconds of `CLOCK_REALTIME`.
    pub fn since(&self, time_ns: i64) -> Vec<&Path> {
        let is_new = |(_, mark): &&(PathBuf, Mark)| {
            mark.is_some_and(|(_, [.., seconds, nanos])| {
                seconds.saturating_mul(1_000_000_000) + nanos >= time_ns
            })
        };
        self.files
            .iter()
            .filter(is_new)
            .map(|(path, _)| path.as_path())
            .collect()
    }

    /// Marks these files as they are now.
    pub fn renew(&mut self, paths: &[PathBuf]) {
        for (path, mark) in &mut self.files {
            if paths.contains(path) {
                *mark = mark_of(path, self.detail);
            }
        }
    }
}

#[expect(clippy::cast_possible_wrap, reason = "numbers are only compared")]
fn mark_of(path: &Path, detail: Detail) -> Mark {
    let about = stat(path).ok()?;
    let kind = FileType::from_raw_mode(about.st_mode);
    let state = match detail {
        Detail::Kind => [0; 6],
        Detail::State => [
            about.st_ino as i64,
            about.st_size,
            about.st_mtime,
            about.st_mtime_nsec as i64,
            about.st_ctime,
            about.st_ctime_nsec as i64,
        ],
    };
    Some((kind, state))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procfs::fake_root::FakeRoot;

    #[test]
    fn files_are_told_from_later_versions_and_kinds_of_files_from_others() {
        let root = FakeRoot::with(&[("same", "1"), ("edited", "1"), ("gone", "1"), ("kind", "1")]);
        let paths =
            |names: &[&str]| -> Vec<PathBuf> { names.iter().map(|name| root.path().join(name)).collect() };
        let mut marks = Marks::new(paths(&["same", "edited", "gone", "new", "bad\0"]), Detail::State);
        let kinds = Marks::new(paths(&["edited", "kind", "new"]), Detail::Kind);
        assert_eq!(marks.changed(), paths(&[]));
        root.file("edited", b"22");
        root.file("new", b"1");
        std::fs::remove_file(root.path().join("gone")).unwrap();
        std::fs::remove_file(root.path().join("kind")).unwrap();
        std::fs::create_dir(root.path().join("kind")).unwrap();
        assert_eq!(marks.changed(), paths(&["edited", "gone", "new"]));
        assert_eq!(kinds.changed(), paths(&["kind", "new"]));
        marks.renew(&paths(&["edited", "new"]));
        assert_eq!(marks.changed(), paths(&["gone"]));
        assert_eq!(marks.since(0), paths(&["same", "edited", "gone", "new"]));
        assert_eq!(marks.since(i64::MAX), paths(&[]));
    }
}
