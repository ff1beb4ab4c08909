;; Describes an undefined kind.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (i32.store (i32.const 320) (i32.const 99)))
  (func $odd (param i32))
)
