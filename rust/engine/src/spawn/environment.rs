//! The environment of workers, and the look-up of programs on their `PATH`.

use std::collections::HashMap;
use std::ffi::{CStr, CString};

use rustix::fs::{Access, AtFlags, CWD, FileType, accessat, stat};
use rustix::io::Errno;

use crate::event::{Stage, StartFailure};
use crate::spec::{EnvEntry, WorkerSpec};
use crate::sys::clone::PointerArray;
use crate::tree::TOKEN_VARIABLE;

/// The group's environment with an index, so that placing a worker's few own entries takes no search.
pub(crate) struct EnvTable {
    entries: Vec<EnvEntry>,
    index: HashMap<Box<[u8]>, usize>,
    /// Entries that are not variables, and repeated entries of a variable.
    odd: Vec<CString>,
}

impl EnvTable {
    /// `extra` is the job's mark. It replaces every entry of the same name.
    pub(crate) fn new(base: &[EnvEntry], odd: &[CString], extra: EnvEntry) -> Self {
        let is_kept = |entry: &&CString| name(entry) != extra.key();
        let mut table = Self {
            entries: Vec::with_capacity(base.len() + 1),
            index: HashMap::new(),
            odd: odd.iter().filter(is_kept).cloned().collect(),
        };
        for entry in base.iter().cloned().chain([extra]) {
            if let Some(&at) = table.index.get(entry.key()) {
                table.entries[at] = entry;
            } else {
                table.index.insert(entry.key().into(), table.entries.len());
                table.entries.push(entry);
            }
        }
        table
    }

    /// The environment of a worker with entries of its own.
    pub(super) fn pointers<'a>(&'a self, own: &'a [EnvEntry]) -> PointerArray<'a> {
        PointerArray::new(self.block(own))
    }

    /// The entries for a worker with entries of its own, which never replace the job's mark.
    pub(super) fn block<'a>(&'a self, own: &'a [EnvEntry]) -> impl Iterator<Item = &'a CStr> {
        let mut strings: Vec<&CStr> = self.entries.iter().map(EnvEntry::text).collect();
        let mut new: Vec<&EnvEntry> = Vec::new();
        for entry in own
            .iter()
            .filter(|entry| entry.key() != TOKEN_VARIABLE.as_bytes())
        {
            if let Some(&at) = self.index.get(entry.key()) {
                strings[at] = entry.text();
            } else if let Some(known) = new.iter_mut().find(|known| known.key() == entry.key()) {
                *known = entry;
            } else {
                new.push(entry);
            }
        }
        let is_kept = |entry: &&CString| !own.iter().any(|own| own.key() == name(entry));
        let odd = self.odd.iter().filter(is_kept).map(CString::as_c_str);
        strings.extend(new.into_iter().map(EnvEntry::text).chain(odd));
        strings.into_iter()
    }

    /// The value that a worker finds under this name.
    fn value<'a>(&'a self, own: &'a [EnvEntry], key: &[u8]) -> Option<&'a [u8]> {
        let own = own.iter().rev().find(|entry| entry.key() == key);
        own.or_else(|| self.index.get(key).map(|&at| &self.entries[at]))
            .map(EnvEntry::value)
    }
}

/// The name of an entry as a program finds it; empty if it has none.
fn name(entry: &CString) -> &[u8] {
    let text = entry.as_bytes();
    let equals = text.iter().position(|&byte| byte == b'=');
    &text[..equals.unwrap_or(0)]
}

/// Searched for a worker without a `PATH`.
const USUAL_PATH: &[u8] = b"/usr/local/bin:/usr/bin:/bin";

/// Results of a group's look-ups, by directory, search path and name. Most workers share all three.
#[derive(Default)]
pub(super) struct Programs(HashMap<(CString, Vec<u8>, CString), Result<CString, Errno>>);

impl Programs {
    /// Forgets all results: files come and go between two groups.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The path of a worker's program.
    pub(super) fn find(&mut self, spec: &WorkerSpec, env: &EnvTable) -> Result<CString, StartFailure> {
        let program = &spec.argv[0];
        if program.as_bytes().contains(&b'/') {
            return Ok(program.clone());
        }
        let search = env.value(&spec.env, b"PATH").unwrap_or(USUAL_PATH);
        // Relative items of `PATH` start at the worker's own directory.
        let base = spec.cwd.as_deref().unwrap_or(c".");
        let key = (base.to_owned(), search.to_vec(), program.clone());
        let found = self
            .0
            .entry(key)
            .or_insert_with(|| find_program(program, search, base));
        found.clone().map_err(|errno| StartFailure {
            stage: Stage::Exec,
            errno: errno.raw_os_error(),
            path: Some(program.clone()),
        })
    }
}

/// Looks for an executable on a search path, as a shell does. The error tells a match that may not be executed from
/// no match at all. Relative items of the path are below `base`, and so is the result.
fn find_program(program: &CStr, search: &[u8], base: &CStr) -> Result<CString, Errno> {
    let mut error = Errno::NOENT;
    for directory in search.split(|byte| *byte == b':') {
        let directory = if directory.is_empty() { b"." } else { directory };
        let Ok(path) = CString::new([directory, b"/", program.to_bytes()].concat()) else {
            continue;
        };
        let seen = if directory.starts_with(b"/") {
            path.clone()
        } else {
            let seen = [base.to_bytes(), b"/", path.as_bytes()].concat();
            CString::new(seen).map_err(|_| Errno::INVAL)?
        };
        match accessat(CWD, seen.as_c_str(), Access::EXEC_OK, AtFlags::EACCESS) {
            Ok(()) if is_directory(&seen) => error = Errno::ACCESS,
            Ok(()) => return Ok(path),
            Err(Errno::ACCESS) => error = Errno::ACCESS,
            Err(_) => {}
        }
    }
    Err(error)
}

fn is_directory(path: &CStr) -> bool {
    stat(path).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode).is_dir())
}

#[cfg(test)]
mod tests;
