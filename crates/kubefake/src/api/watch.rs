//! Watches: what happened since a revision, and then as it happens.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::{
    sync::{broadcast, mpsc},
    time::{Instant, interval_at, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::{
    core::{Core, Shared},
    error::ApiError,
    faults::WatchFault,
    request::{Query, Target},
    resources::Resource,
    selector::Selector,
    store::{Change, TooOld},
    table::Form,
};

/// What the real server does about once a minute.
const BOOKMARK_EVERY: Duration = Duration::from_secs(60);
/// When a client names no time.
const TIMEOUT: Duration = Duration::from_secs(1800);
/// Events on their way to a slow reader.
const QUEUE: usize = 100;

/// A watch that was accepted.
#[derive(Debug)]
pub(crate) struct Watch {
    resource: Resource,
    namespace: Option<String>,
    selector: Selector,
    form: Form,
    revision: u64,
    /// Begin with what is there.
    initial: bool,
    /// Say with a bookmark that this was all.
    initial_end: bool,
    bookmarks: bool,
    timeout: Duration,
}

type Sender = mpsc::Sender<Result<Bytes, io::Error>>;

/// Nobody listens any more.
struct Left;

impl Watch {
    pub(crate) fn parse(target: &Target, query: &Query, form: Form) -> Result<Self, ApiError> {
        let mut fields = query.get("fieldSelector").unwrap_or("").to_owned();
        if let Some(name) = &target.name {
            let separator = if fields.is_empty() { "" } else { "," };
            fields = format!("{fields}{separator}metadata.name={name}");
        }
        let selector =
            Selector::parse(query.get("labelSelector"), Some(&fields), &target.resource)?;
        let revision = super::read::asked_revision(query)?;
        let initial_end = query.flag("sendInitialEvents");
        if initial_end && query.get("resourceVersionMatch") != Some("NotOlderThan") {
            let cause = crate::error::Cause::forbidden(
                "resourceVersionMatch",
                "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
            );
            let mut listed = target.resource.clone();
            listed.kind = "ListOptions".into();
            return Err(ApiError::invalid(&listed, "", &[cause]));
        }
        let none = query.get("sendInitialEvents") == Some("false");
        Ok(Self {
            resource: target.resource.clone(),
            namespace: Some(target.namespace.clone()).filter(|n| !n.is_empty()),
            selector,
            form,
            revision,
            initial: initial_end || (revision == 0 && !none),
            initial_end,
            bookmarks: query.flag("allowWatchBookmarks"),
            timeout: query
                .number("timeoutSeconds")
                .map_or(TIMEOUT, Duration::from_secs),
        })
    }

    /// Sends events until the time is up, the reader leaves, or a fault ends it.
    pub(crate) async fn serve(
        mut self,
        core: Shared,
        sender: Sender,
        faults: broadcast::Receiver<WatchFault>,
        stop: CancellationToken,
    ) {
        let _ = self.run(&core, &sender, &stop, faults).await;
    }

    async fn run(
        &mut self,
        core: &Core,
        sender: &Sender,
        stop: &CancellationToken,
        mut faults: broadcast::Receiver<WatchFault>,
    ) -> Result<(), Left> {
        let mut changed = core.changes();
        let qualified = self.resource.qualified();
        if self.initial {
            let (objects, revision) = {
                let store = core.store();
                let listed = store.list(&qualified, self.namespace.as_deref());
                let chosen = listed.filter(|(_, object)| self.selector.matches(object));
                let objects: Vec<Arc<Value>> = chosen.map(|(_, o)| Arc::clone(o)).collect();
                (objects, store.revision())
            };
            for object in objects {
                self.send(sender, "ADDED", &object).await?;
            }
            self.revision = revision;
            if self.initial_end && self.bookmarks {
                self.bookmark(sender, true).await?;
            }
        } else if self.revision == 0 {
            self.revision = core.store().revision();
        }
        let end = sleep(self.timeout);
        tokio::pin!(end);
        let mut tick = interval_at(Instant::now() + BOOKMARK_EVERY, BOOKMARK_EVERY);
        loop {
            changed.borrow_and_update();
            let news = core.store().changes_after(self.revision);
            match news {
                Err(TooOld { oldest }) => {
                    let error = ApiError::too_old(self.revision, oldest);
                    return self.send_error(sender, &error).await;
                }
                Ok(changes) => {
                    for change in changes {
                        self.revision = change.revision;
                        self.tell(sender, &qualified, &change).await?;
                    }
                }
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = sender.closed() => return Err(Left),
                () = stop.cancelled() => return Ok(()),
                () = &mut end => {
                    if self.bookmarks {
                        self.bookmark(sender, false).await?;
                    }
                    return Ok(());
                }
                _ = tick.tick() => if self.bookmarks {
                    self.bookmark(sender, false).await?;
                },
                fault = faults.recv() => match fault {
                    Ok(WatchFault::Bookmark) => if self.bookmarks {
                        self.bookmark(sender, false).await?;
                    },
                    Ok(WatchFault::Expire) => {
                        let oldest = core.store().revision();
                        let error = ApiError::too_old(self.revision, oldest);
                        return self.send_error(sender, &error).await;
                    }
                    Ok(WatchFault::End) => return Ok(()),
                    Ok(WatchFault::Cut) => {
                        // An error in a body closes the connection in the middle of it.
                        let cut = io::Error::from(io::ErrorKind::ConnectionReset);
                        return sender.send(Err(cut)).await.map_err(|_| Left);
                    }
                    Err(broadcast::error::RecvError::Lagged(_)) => {}
                    Err(broadcast::error::RecvError::Closed) => return Ok(()),
                },
            }
        }
    }

    async fn tell(&self, sender: &Sender, resource: &str, change: &Change) -> Result<(), Left> {
        let here = change.key.resource == resource
            && self
                .namespace
                .as_ref()
                .is_none_or(|n| *n == change.key.namespace);
        if !here {
            return Ok(());
        }
        let fits = |o: &Option<Arc<Value>>| o.as_ref().is_some_and(|o| self.selector.matches(o));
        match (fits(&change.before), fits(&change.after)) {
            (false, false) => Ok(()),
            (false, true) => self.send_some(sender, "ADDED", change.after.as_ref()).await,
            (true, true) => {
                self.send_some(sender, "MODIFIED", change.after.as_ref())
                    .await
            }
            (true, false) => {
                let Some(before) = &change.before else {
                    return Ok(());
                };
                let mut last = (**before).clone();
                last["metadata"]["resourceVersion"] = json!(change.revision.to_string());
                self.send(sender, "DELETED", &last).await
            }
        }
    }

    async fn send_some(
        &self,
        sender: &Sender,
        kind: &str,
        object: Option<&Arc<Value>>,
    ) -> Result<(), Left> {
        match object {
            Some(object) => self.send(sender, kind, object).await,
            None => Ok(()),
        }
    }

    async fn send(&self, sender: &Sender, kind: &str, object: &Value) -> Result<(), Left> {
        let event = json!({"type": kind, "object": self.form.object(object)});
        send_line(sender, &event).await
    }

    async fn bookmark(&self, sender: &Sender, initial_end: bool) -> Result<(), Left> {
        let mut object = json!({
            "kind": self.resource.kind,
            "apiVersion": self.resource.api_version(),
            "metadata": {
                "resourceVersion": self.revision.to_string(), "creationTimestamp": null,
            },
        });
        if initial_end {
            object["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        if self.resource.is("pods") {
            object["spec"] = json!({"containers": null});
            object["status"] = json!({});
        }
        let object = match self.form {
            Form::Plain => object,
            other => other.object(&object),
        };
        send_line(sender, &json!({"type": "BOOKMARK", "object": object})).await
    }

    async fn send_error(&self, sender: &Sender, error: &ApiError) -> Result<(), Left> {
        send_line(sender, &json!({"type": "ERROR", "object": error.status()})).await
    }
}

async fn send_line(sender: &Sender, event: &Value) -> Result<(), Left> {
    let line = Bytes::from(format!("{event}\n"));
    sender.send(Ok(line)).await.map_err(|_| Left)
}

/// The body of a watch and who fills it.
pub(crate) fn channel() -> (Sender, mpsc::Receiver<Result<Bytes, io::Error>>) {
    mpsc::channel(QUEUE)
}
