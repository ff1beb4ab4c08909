;; Returns another name in each call of `describe`: its length is the number of calls.
;;! contract 0.2.0
(module
  ;;! include reward
  (func $describe_odd
    (i32.store (i32.const 68) (i32.add (i32.load (i32.const 400)) (i32.const 8)))
    (i32.store (i32.const 400) (i32.add (i32.load (i32.const 400)) (i32.const 1))))
  (func $odd (param i32))
)
