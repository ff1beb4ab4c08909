;; Loops during instantiation.
(module
  ;;! include reward
  (func $odd (param i32))
  (start $loop)
  (func $loop
    (loop $again
      (br $again)))
)
