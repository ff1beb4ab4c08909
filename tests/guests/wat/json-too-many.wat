;; Returns JSON with 100,000 results for any number of episodes.
;;! contract 0.2.0
;;! world export querl:plugin/info@0.1.0;
;;! world export querl:plugin/rewards@0.1.0;
;;! world export querl:plugin/json-rewards@0.1.0;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include json
  ;; Never called: the host prefers the JSON form.
  (func (export "querl:plugin/rewards@0.1.0#score-batch") (param i32 i32) (result i32)
    (unreachable))
  (data (i32.const 1600) "{\22scored\22:{\22total\22:0.5}},")
  (func $odd (result i32)
    (local $at i32) (local $n i32)
    (drop (memory.grow (i32.const 50)))
    (i32.store8 (i32.const 131072) (i32.const 91))
    (local.set $at (i32.const 131073))
    (local.set $n (i32.const 100000))
    (loop $next
      (memory.copy (local.get $at) (i32.const 1600) (i32.const 25))
      (local.set $at (i32.add (local.get $at) (i32.const 25)))
      (local.set $n (i32.sub (local.get $n) (i32.const 1)))
      (br_if $next (local.get $n)))
    (i32.store8 (i32.sub (local.get $at) (i32.const 1)) (i32.const 93))
    (global.set $n_odd_bytes (i32.const 2500001))
    (i32.const 131072))
)
