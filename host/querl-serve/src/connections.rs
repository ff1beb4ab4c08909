//! The open connections of a server, and which of them is closed when there are too many.
//!
//! A new connection is always accepted. At a limit the oldest connection without a complete request is closed for it: one that is idle,
//! sends its request slowly or does not read its response. A connection whose request is complete is never closed for another. Such
//! requests hold at most seven eighths of the connections, of all and of each peer, so that there always is one to close: half-sent
//! requests and a full queue do not delay `/health` and `/ready`, which are answered without a place among the requests.

use crate::server::ServerLimits;
use axum::Extension;
use axum::extract::FromRequestParts;
use axum::extract::rejection::ExtensionRejection;
use axum::http::StatusCode;
use axum::http::request::Parts;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::Notify;

/// The reason why a complete request gets 429 or 503: too many requests are in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RequestLimitError {
    #[error("{0} requests are in progress, the maximum of this server; retry later")]
    Server(usize),
    #[error("{0} requests of this address are in progress, the maximum for one address; retry later")]
    Peer(usize),
}

impl RequestLimitError {
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::Server(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::Peer(_) => StatusCode::TOO_MANY_REQUESTS,
        }
    }
}

struct Connection {
    peer: IpAddr,
    /// True if the request is complete and its response is not finished.
    has_request: bool,
    /// Time when the connection was accepted, or of the last request head or response.
    since: Instant,
    close: Arc<Notify>,
}

#[derive(Default)]
struct Table {
    next_id: u64,
    open: BTreeMap<u64, Connection>,
}

impl Table {
    fn n_open(&self, peer: IpAddr) -> usize {
        self.open.values().filter(|connection| connection.peer == peer).count()
    }

    /// Closes the oldest connection without a complete request.
    fn close_oldest(&mut self, is_candidate: impl Fn(&Connection) -> bool) {
        let candidates = self.open.iter().filter(|(_, connection)| !connection.has_request && is_candidate(connection));
        let oldest = candidates.min_by_key(|(_, connection)| connection.since).map(|(&id, _)| id);
        if let Some(connection) = oldest.and_then(|id| self.open.remove(&id)) {
            connection.close.notify_one();
        }
    }

    /// Closes all connections without a complete request since `deadline`.
    fn close_all(&mut self, deadline: Instant) {
        self.open.retain(|_, connection| {
            let stays = connection.has_request || connection.since > deadline;
            if !stays {
                connection.close.notify_one();
            }
            stays
        });
    }

    /// Checks the requests in progress of one peer, or of all.
    fn check_requests(&self, peer: Option<IpAddr>, limits: &ServerLimits) -> Result<(), RequestLimitError> {
        let is_counted = |connection: &&Connection| peer.is_none_or(|peer| connection.peer == peer);
        let n_requests = self.open.values().filter(|open| open.has_request).filter(is_counted).count();
        let error = match peer {
            Some(_) => RequestLimitError::Peer(requests_of(limits.max_connections_per_peer)),
            None => RequestLimitError::Server(requests_of(limits.max_connections)),
        };
        let (RequestLimitError::Peer(maximum) | RequestLimitError::Server(maximum)) = error;
        if n_requests < maximum { Ok(()) } else { Err(error) }
    }
}

/// Maximum number of complete requests for a number of connections: seven eighths.
fn requests_of(n_connections: usize) -> usize {
    n_connections - n_connections.div_ceil(8)
}

/// The peer of an address: an IPv4 address, or an IPv6 /64 network, which is what a provider assigns to one customer.
fn peer_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        address @ IpAddr::V4(_) => address,
    }
}

pub(crate) struct Connections {
    limits: ServerLimits,
    table: Mutex<Table>,
}

impl Connections {
    pub(crate) fn new(limits: ServerLimits) -> Arc<Self> {
        Arc::new(Self { limits, table: Mutex::default() })
    }

    /// Adds a new connection. At a limit, closes the oldest connection without a complete request.
    pub(crate) fn add(self: &Arc<Self>, address: IpAddr) -> OpenConnection {
        let peer = peer_of(address);
        let mut table = self.table();
        if table.n_open(peer) >= self.limits.max_connections_per_peer {
            table.close_oldest(|connection| connection.peer == peer);
        } else if table.open.len() >= self.limits.max_connections {
            table.close_oldest(|_| true);
        }
        let (id, close) = (table.next_id, Arc::new(Notify::new()));
        table.next_id += 1;
        let connection = Connection { peer, has_request: false, since: Instant::now(), close: close.clone() };
        table.open.insert(id, connection);
        OpenConnection { handle: ConnectionHandle { connections: self.clone(), id, peer }, close }
    }

    pub(crate) fn close_oldest(&self) {
        self.table().close_oldest(|_| true);
    }

    /// Closes connections whose client has not read its response within `send_timeout`. The HTTP library closes idle connections
    /// earlier.
    pub(crate) fn close_stalled(&self) {
        if let Some(deadline) = Instant::now().checked_sub(self.limits.send_timeout) {
            self.table().close_all(deadline);
        }
    }

    /// Closes all connections without a complete request.
    pub(crate) fn close_incomplete(&self) {
        self.table().close_all(Instant::now());
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open connection; dropping the value removes it from the table.
pub(crate) struct OpenConnection {
    handle: ConnectionHandle,
    close: Arc<Notify>,
}

impl OpenConnection {
    pub(crate) fn handle(&self) -> ConnectionHandle {
        self.handle.clone()
    }

    /// Completes when the server wants the connection to be closed.
    pub(crate) async fn closed(&self) {
        self.close.notified().await;
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.handle.connections.table().open.remove(&self.handle.id);
    }
}

/// Handle of a connection, which each request on it has as an extension.
#[derive(Clone)]
pub(crate) struct ConnectionHandle {
    connections: Arc<Connections>,
    id: u64,
    peer: IpAddr,
}

impl ConnectionHandle {
    /// Restarts the time limit of the connection, when the head of a request has arrived or that of a response is ready.
    pub(crate) fn note_progress(&self) {
        if let Some(connection) = self.connections.table().open.get_mut(&self.id) {
            connection.since = Instant::now();
        }
    }

    /// Counts a request that has arrived completely as in progress, until the returned value is dropped.
    ///
    /// # Errors
    /// The limit of requests is reached.
    pub(crate) fn begin_request(&self) -> Result<RequestSlot, RequestLimitError> {
        let mut table = self.connections.table();
        table.check_requests(None, &self.connections.limits)?;
        table.check_requests(Some(self.peer), &self.connections.limits)?;
        if let Some(connection) = table.open.get_mut(&self.id) {
            connection.has_request = true;
        }
        Ok(RequestSlot(self.clone()))
    }

    /// Checks whether a further request would be accepted.
    pub(crate) fn check_requests(&self) -> Result<(), RequestLimitError> {
        self.connections.table().check_requests(None, &self.connections.limits)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for ConnectionHandle {
    type Rejection = ExtensionRejection;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ExtensionRejection> {
        let Extension(connection) = Extension::<Self>::from_request_parts(parts, state).await?;
        Ok(connection)
    }
}

/// A request in progress; dropped once its response is complete, also for streams.
pub(crate) struct RequestSlot(ConnectionHandle);

impl Drop for RequestSlot {
    fn drop(&mut self) {
        if let Some(connection) = self.0.connections.table().open.get_mut(&self.0.id) {
            (connection.has_request, connection.since) = (false, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn connections(max_connections: usize, max_connections_per_peer: usize) -> Arc<Connections> {
        Connections::new(ServerLimits { max_connections, max_connections_per_peer, ..ServerLimits::default() })
    }

    fn address(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    fn is_open(connection: &OpenConnection) -> bool {
        connection.handle.connections.table().open.contains_key(&connection.handle.id)
    }

    #[test]
    fn a_peer_at_its_limit_loses_its_own_oldest_connection_without_a_request() {
        let connections = connections(16, 8);
        let stranger = connections.add(address(2));
        let own: Vec<_> = (0..8).map(|_| connections.add(address(1))).collect();
        let _request = own[0].handle.begin_request().unwrap();
        own[1].handle.note_progress();
        let newest = connections.add(address(1));
        assert!(is_open(&stranger) && is_open(&newest));
        let open: Vec<bool> = own.iter().map(is_open).collect();
        assert_eq!(open, [true, true, false, true, true, true, true, true], "the third is the oldest without progress");
    }

    #[test]
    fn complete_requests_leave_an_eighth_of_the_connections_and_are_never_closed() {
        let connections = connections(16, 8);
        let of_peer = |last| (0..8).map(|_| connections.add(address(last))).collect::<Vec<_>>();
        let (first, second) = (of_peer(1), of_peer(2));
        let mut requests: Vec<_> = first[..7].iter().map(|own| own.handle.begin_request().unwrap()).collect();
        let rejected = |own: &OpenConnection| own.handle.begin_request().err();
        assert_eq!(rejected(&first[7]), Some(RequestLimitError::Peer(7)));
        requests.extend(second[..7].iter().map(|own| own.handle.begin_request().unwrap()));
        let third = connections.add(address(3));
        assert_eq!(rejected(&third), Some(RequestLimitError::Server(14)));
        assert!(!is_open(&first[7]), "the oldest of the two without a request");
        let _fourth = connections.add(address(4));
        assert!(first[..7].iter().chain(&second[..7]).all(is_open));
        requests.pop();
        assert!(third.handle.begin_request().is_ok(), "the place of a finished request is free again");
    }

    #[test]
    fn a_connection_without_progress_is_closed_after_the_time_limit() {
        let limits = |send_timeout| ServerLimits { send_timeout, ..ServerLimits::default() };
        let patient = Connections::new(limits(Duration::from_secs(60)));
        let waiting = patient.add(address(1));
        patient.close_stalled();
        assert!(is_open(&waiting));
        let strict = Connections::new(limits(Duration::ZERO));
        let (stalled, busy) = (strict.add(address(1)), strict.add(address(1)));
        let _request = busy.handle.begin_request().unwrap();
        strict.close_stalled();
        assert!(!is_open(&stalled) && is_open(&busy));
    }

    #[test]
    fn a_peer_is_an_ipv4_address_or_an_ipv6_network() {
        let peer = |text: &str| peer_of(text.parse().unwrap());
        assert_eq!(peer("2001:db8:1:2:3::4"), peer("2001:db8:1:2::9"));
        assert_ne!(peer("2001:db8:1:2::"), peer("2001:db8:1:3::"));
        assert_eq!(peer("::ffff:192.0.2.1"), peer("192.0.2.1"));
        assert_ne!(peer("192.0.2.1"), peer("192.0.2.2"));
    }
}
