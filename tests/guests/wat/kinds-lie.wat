;; Describes itself as a filter, but exports a reward.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (i32.store (i32.const 320) (i32.const 1)))
  (func $odd (param i32))
)
