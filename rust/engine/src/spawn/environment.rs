//! The environment of workers.

use std::collections::HashMap;
use std::ffi::{CStr, CString};

use crate::spec::EnvEntry;
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
    pub(super) fn value<'a>(&'a self, own: &'a [EnvEntry], key: &[u8]) -> Option<&'a [u8]> {
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

#[cfg(test)]
mod tests;
