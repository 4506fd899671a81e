//! Saving a machine that goes on while its memory is being written.
//!
//! In the stop there is what cannot be done beside a running guest: the vCPUs' and devices' state, the cut of the disks, and a copy
//! of this process ([`crate::writer`]), whose cost is that of the page tables. Only when there is a copy do the disks go on in their
//! new layers, so until then a failure leaves the machine as it was. Afterwards the machine owes the copy nothing: one that fails, or is
//! killed, fails the save alone.

use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::epoll;
use vmm_control::{Event, Standstill, StopReason};

use crate::event_loop::{EventLoop, WRITER};
use crate::image;
use crate::save::{SaveError, Taken};
use crate::writer::{Job, Writer};

fn nanos(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_nanos()).unwrap_or(u64::MAX)
}

impl EventLoop {
    /// Saves, and lets the machine go on; `descriptors` are in the order of [`vmm_control::Request::Save`].
    pub(crate) fn save_live(&mut self, descriptors: Vec<OwnedFd>) -> Option<StopReason> {
        let asked = Instant::now();
        let (flushed, taken, forked) = match self.take_and_fork(descriptors) {
            Ok(times) => times,
            Err(error) => {
                self.tell(&Event::SaveFailed { error: error.to_string() });
                return None;
            }
        };
        let (began, complete) = self.pause.since.unwrap_or((asked, asked));
        if let Err(reason) = self.go_on() {
            return Some(reason);
        }
        self.tell(&Event::Taken(Standstill {
            quiesce: nanos(began, complete),
            request: nanos(complete, asked),
            disks: nanos(asked, flushed),
            state: nanos(flushed, taken),
            fork: nanos(taken, forked),
            resume: nanos(forked, Instant::now()),
        }));
        None
    }

    /// When the disks had been flushed, when all was taken, and when the copy was made.
    fn take_and_fork(&mut self, descriptors: Vec<OwnedFd>) -> Result<(Instant, Instant, Instant), SaveError> {
        let Taken { state, memory, pagemap, disks, flushed } = self.take(descriptors)?;
        image::check_pagemap(&self.machine.made_of.memory, &pagemap)?;
        let job = Job { state, memory, pagemap };
        let taken = Instant::now();
        let writer = Writer::start(&job, &self.machine.made_of.memory)?;
        let forked = Instant::now();
        let watched = epoll::add(&self.poll, &writer, epoll::EventData::new_u64(WRITER), epoll::EventFlags::IN);
        if let Err(error) = watched {
            // Nobody would hear of its end, and another save would find it at work.
            writer.wait();
            return Err(SaveError::Watch(error.into()));
        }
        self.writer = Some(writer);
        self.switch(disks);
        Ok((flushed, taken, forked))
    }

    /// The copy has ended.
    pub(crate) fn on_writer(&mut self) {
        let Some(outcome) = self.writer.as_ref().and_then(Writer::outcome) else { return };
        // Its descriptor leaves the set with it: nobody else has one.
        self.writer = None;
        self.tell(&match outcome {
            Ok(saved) => Event::Saved(saved),
            Err(error) => Event::SaveFailed { error: error.to_string() },
        });
    }
}
