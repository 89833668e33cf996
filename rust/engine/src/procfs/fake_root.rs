//! A directory that stands in for `/` in tests, removed at the end.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

static NEXT: AtomicU32 = AtomicU32::new(0);

pub(crate) struct FakeRoot(PathBuf);

impl FakeRoot {
    pub(crate) fn new() -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dsl-root-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("a fresh name in the temporary directory");
        Self(path)
    }

    pub(crate) fn with(files: &[(&str, &str)]) -> Self {
        let root = Self::new();
        for (name, text) in files {
            root.file(name, text.as_bytes());
        }
        root
    }

    pub(crate) fn file(&self, name: &str, text: &[u8]) {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().expect("a file below the root"))
            .and_then(|()| std::fs::write(&path, text))
            .expect("writing below the fake root");
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for FakeRoot {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
