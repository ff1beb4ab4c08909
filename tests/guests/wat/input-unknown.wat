;; Requires an input unknown to this host.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (i32.store (i32.const 120) (i32.const 2048))
    (i32.store (i32.const 124) (i32.const 1))
    (i32.store (i32.const 2048) (i32.const 7))
    (i32.store (i32.const 2052) (i32.const 1280))
    (i32.store (i32.const 2056) (i32.const 5))
    (i32.store (i32.const 2060) (i32.const 1)))
  (func $odd (param i32))
)
