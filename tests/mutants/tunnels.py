# SPDX-License-Identifier: Apache-2.0

"""Mutants of the tunnel of a client that nobody can dial: its link, its channels, and what bounds its memory."""

from __future__ import annotations

from tests.mutants.mutant import catalogue

TUNNELS = catalogue(r"""
packet-is-forgotten-when-sent [feared; H196]
  A packet is not kept until it has arrived.
  @ protocol.tunnel:TunnelEnd.send_again
  - self._again.append(number)
responses-begin-without-what-was-lost [feared; H196]
  The responses begin again with what is new.
  @ protocol.tunnel:TunnelEnd.send_all_again
  - self._again = deque(self._kept)
packet-counts-twice [feared; H196]
  A packet that comes again is taken again.
  @ protocol.tunnel:TunnelEnd.receive
  F if number <= self._taken or number in self._early:
early-packet-is-taken [feared; H196]
  A packet is taken before those with lower numbers.
  @ protocol.tunnel:TunnelEnd.receive
  ~ self._early[number] = data => self._early[self._taken + 1] = data
early-packet-is-dropped [feared; H196]
  Only one packet is taken at a time, and those that came early are left.
  @ protocol.tunnel:TunnelEnd.receive
  ~ while (packet := => if (packet :=
repeated-packet-is-not-acknowledged [found; H196]
  An acknowledgement that was lost is not repeated.
  @ protocol.tunnel:TunnelEnd.receive
  - self._ack_due = True  # perhaps the other end has not learnt that it is here
arrived-is-acknowledged [feared; H196]
  One call that has returned counts for all before it.
  @ protocol.tunnel:TunnelEnd.arrived
  - self._kept[number] = _Kept(kept.size, None)
  + self.acknowledge(number)
end-overtakes-data [feared; H196]
  The end of a channel is sent before its data.
  @ protocol.tunnel:TunnelEnd._data_of
  - if one.unsent_bytes:
  -         self._ready[channel] = None
  -     elif one.ends
  + if one.unsent_bytes:
  +         self._ready[channel] = None
  +     if one.ends
end-is-lost-with-the-last-data [feared; H196]
  A channel that is ended while it waits for credit does not send its end.
  @ protocol.tunnel:TunnelEnd.end
  - one.ends = True
  + one.ends = channel not in self._blocked
reset-does-not-drop-the-data [feared; H196]
  A channel that was reset here stays among those that have data to send.
  @ protocol.tunnel:TunnelEnd._forget
  - self._ready.pop(channel, None)
reset-is-not-sent [feared; H196]
  The other end does not learn that a channel was given up.
  @ protocol.tunnel:TunnelEnd.reset
  - self._control.append(_FRAME.pack(channel, _RESET, 0))
half-ended-is-forgotten [feared; H196]
  A channel that has ended in one direction is over in both.
  @ protocol.tunnel:TunnelEnd._forget_if_both_ended
  ~ one.end_sent and one.peer_ended => one.end_sent or one.peer_ended
data-of-a-reset-channel-is-passed-on [feared; H196]
  Data comes after the channel was reset here.
  @ protocol.tunnel:TunnelEnd._take_data
  - self.consumed(channel, size)
  + events.append(DataReceived(channel, data))
split-data-is-repeated [feared; H196]
  What does not fit into a frame begins again from its start.
  @ protocol.tunnel:TunnelEnd._data_of
  ~ part[:size], part[size:] => part[:size], part
credit-is-not-counted [feared; H197]
  A channel sends without regard to what waits for credit.
  @ protocol.tunnel:TunnelEnd._data_of
  - self._uncredited[channel] = sent + size
  + self._uncredited[channel] = size
credit-wakes-nobody [feared; H197]
  Channels that wait for credit do not go on when it comes.
  @ protocol.tunnel:TunnelEnd._take_credit
  - self._ready.update(self._blocked)
reset-gives-no-credit [found; H197]
  What waits at a channel that is reset never counts as passed on.
  @ protocol.tunnel:TunnelEnd._forget
  - self.consumed(channel, self._unconsumed.get(channel, 0))
credit-waits-while-little-is-left [found; H197]
  What was passed on is credited late although there is little left for all.
  @ protocol.tunnel:TunnelEnd._take_data
  F if self._is_tight and self._credits:
little-credit-waits [feared; H197]
  A small credit waits for a larger one although there is little left for all.
  @ protocol.tunnel:TunnelEnd.consumed
  ~ limits.channel_bytes_least // 2 if self._is_tight => limits.channel_bytes_max if self._is_tight
no-share-for-each [feared; H197]
  A channel may send nothing once all together have what they may have.
  @ protocol.tunnel:TunnelEnd._share
  ~ max(limits.channel_bytes_least => max(0
one-channel-takes-all [feared; H197]
  A channel may have its limit, however much the others have.
  @ protocol.tunnel:TunnelEnd._share
  ~ (limits.total_bytes_max - total) // 2 => limits.total_bytes_max
too-much-is-taken [feared; H197]
  What comes without credit is kept.
  @ protocol.tunnel:TunnelEnd._take_data
  F if held > limits.channel_bytes_max or (over > 0 and over > self._channels_held * limits.channel_bytes_least):
early-packets-have-no-bound [feared; H197]
  Packets that come too early may take any memory.
  @ protocol.tunnel:TunnelEnd.receive
  F if self._early_bytes > 2 * limits.total_bytes_max + limits.packet_bytes_max:
opens-while-the-other-is-away [feared; H197]
  Channels are opened although nothing is acknowledged.
  @ protocol.tunnel:TunnelEnd.can_open
  ~ and waiting < self._limits.total_bytes_max => and waiting >= 0
full-is-never-drained [feared; H197]
  A source that was stopped is not read again.
  @ protocol.tunnel:TunnelEnd._data_of
  - self._drained.append(channel)
any-session-has-the-tunnel [feared; H198]
  A client that knows the name of a tunnel, which is in the texts of plans, has its packets.
  By: tests/spark/connect/test_connect_tunnels_apart.py::
  test_a_name_and_a_key_that_are_not_of_the_session_lead_to_no_tunnel
  @ spark_bridge.connect:TunnelFunction.java
  ~ asked = origin + " " + name; => asked = name;
packets-go-to-any-operation [found; H198]
  A client puts the packets of its tunnel among the responses of another one.
  By: tests/spark/connect/test_connect_tunnels_apart.py::
  test_packets_of_one_session_do_not_get_among_the_responses_of_another
  @ spark_bridge.connect:TunnelFunction.java
  ~ origin.equals(SessionRelay.origin(session.userId(), session.sessionId())) => true
tunnels-of-all-sessions-are-counted [found; H198]
  If the relay is installed, one session can leave none to all others.
  By: tests/spark/connect/test_connect_tunnels_apart.py::
  test_a_session_with_too_many_tunnels_takes_none_from_another_one
  @ spark_bridge.connect:TunnelFunction.java
  ~ .filter(other -> other.startsWith(origin + " ")) => .filter(other -> true)
""")
