//! Streams whose bytes the owner gets as events.

use crate::event::Event;
use crate::supervisor::{Supervisor, Watched};

impl Supervisor {
    /// Stops or resumes reading piped streams; the workers wait meanwhile.
    pub fn set_reading(&mut self, reading: bool) {
        if self.reading == reading {
            return;
        }
        self.reading = reading;
        let Some(job) = &self.job else { return };
        for (index, worker) in job.workers.iter().enumerate() {
            for (stream, pipe) in worker.pipes.iter().enumerate() {
                let Some(pipe) = pipe else { continue };
                if reading {
                    // Fails only when memory is short; what is left is read when the group ends.
                    let _ = self.poller.watch(pipe, Watched::Pipe(index, stream).encode());
                } else {
                    self.poller.forget(pipe);
                }
            }
        }
    }

    pub(super) fn read_pipe(&mut self, worker: usize, stream: usize) {
        let Some(job) = &mut self.job else { return };
        let Some(slot) = job
            .workers
            .get_mut(worker)
            .map(|worker| &mut worker.pipes[stream])
        else {
            return;
        };
        let Some(pipe) = slot.as_ref() else { return };
        let data = match rustix::io::read(pipe, &mut self.buffer[..]) {
            Ok(0) | Err(rustix::io::Errno::IO | rustix::io::Errno::BADF) => {
                self.poller.forget(pipe);
                *slot = None;
                Vec::new()
            }
            Ok(count) => self.buffer[..count].to_vec(),
            Err(_) => return,
        };
        self.push_output(worker, stream, data);
    }

    fn push_output(&mut self, worker: usize, stream: usize, data: Vec<u8>) {
        let stream = stream as u8 + 1;
        self.events.push(Event::Output { worker, stream, data });
    }

    /// Takes what a worker's pipes hold still and closes them.
    pub(super) fn close_pipes(&mut self, worker: usize) {
        for stream in 0..2 {
            let mut before = usize::MAX;
            while before != self.events.len() {
                before = self.events.len();
                self.read_pipe(worker, stream);
            }
            let workers = self.job.as_mut().map(|job| &mut job.workers);
            let pipe = workers.and_then(|workers| workers[worker].pipes[stream].take());
            if let Some(pipe) = pipe {
                // Held open by a process that is not of the job.
                self.poller.forget(&pipe);
                self.push_output(worker, stream, Vec::new());
            }
        }
    }
}
